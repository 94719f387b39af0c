// The worker executable, started as the trainer starts it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/protocol.h"
#include "trainer_arena.h"

namespace zenflow::test {

// The usable logical cores, or the first of them, as an argument of --cores.
std::string all_cores();
std::string first_core();

// Owns the process, which it kills on destruction, and the trainer's end of the socket.
class WorkerProcess {
  public:
    // `cores` and `extra` become arguments. `output` receives both standard streams; if it is negative, nothing does.
    WorkerProcess(const TrainerArena& arena, const std::string& cores, const std::vector<std::string>& extra = {},
                  int output = -1);
    ~WorkerProcess();
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;

    void send(const void* data, size_t size);
    void submit(const UpdateJob& job, const std::vector<uint32_t>& slots);
    void ask_to_exit();
    void signal(int number);
    pid_t pid() const { return pid_; }

    // Bytes of messages that have not been received yet.
    size_t bytes_waiting() const;

    // Wait for the next message, which must be of this type. The text of an unexpected Error message becomes the failure's.
    Ready receive_ready();
    Done receive_done();
    Acknowledged receive_acknowledged();
    std::string receive_error();

    // As the death of the trainer does.
    void close_socket();

    // Waits for the exit and returns its status, or minus the number of the signal that killed the process.
    int wait();

  private:
    std::string receive();

    pid_t pid_ = -1;
    int socket_ = -1;
};

// Runs the worker with `arguments` alone; returns its output on both standard streams and stores the exit status.
std::string output_of_worker(const std::vector<std::string>& arguments, int& status);

}  // namespace zenflow::test
