// Runs all tests, those of the groups named on the command line, or all but those named with a minus: `zenflow-tests -kill`.
#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "check.h"

int main(int argc, char** argv) {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    const auto names = [&arguments](const std::string& name) {
        return std::find(arguments.begin(), arguments.end(), name) != arguments.end();
    };
    const bool all = std::all_of(arguments.begin(), arguments.end(), [](const std::string& name) { return name[0] == '-'; });
    int n_run = 0;
    int n_failed = 0;
    for (const auto& test : zenflow::test::all_tests()) {
        const std::string group = test.group;
        if (!(all ? !names('-' + group) : names(group))) continue;
        ++n_run;
        try {
            test.body();
        } catch (const std::exception& error) {
            ++n_failed;
            std::cout << "FAILED " << group << '.' << test.name << ": " << error.what() << std::endl;
        }
    }
    std::cout << n_run - n_failed << " passed, " << n_failed << " failed" << std::endl;
    return n_run > 0 && n_failed == 0 ? 0 : 1;
}
