// Runs the tests of the groups named on the command line, or all of them.
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "check.h"

int main(int argc, char** argv) {
    const std::vector<std::string> groups(argv + 1, argv + argc);
    int n_run = 0;
    int n_failed = 0;
    for (const auto& test : zenflow::test::all_tests()) {
        if (!groups.empty() && std::find(groups.begin(), groups.end(), test.group) == groups.end()) continue;
        ++n_run;
        try {
            test.body();
        } catch (const std::exception& error) {
            ++n_failed;
            std::cout << "FAILED " << test.group << '.' << test.name << ": " << error.what() << std::endl;
        }
    }
    std::cout << n_run - n_failed << " passed, " << n_failed << " failed" << std::endl;
    return n_run > 0 && n_failed == 0 ? 0 : 1;
}
