// The real worker executable, started as the trainer starts it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "protocol.h"
#include "trainer_arena.h"

namespace zenflow::test {

// The logical cores this process may use, or the first of them, as an argument of --cores.
std::string all_cores();
std::string first_core();

// Owner of the process and of the trainer's end of the socket. Whatever goes wrong, the process is gone when the object is.
class WorkerProcess {
  public:
    // Starts it on `arena`; `cores` and `extra` are passed on.
    WorkerProcess(const TrainerArena& arena, const std::string& cores, const std::vector<std::string>& extra = {});
    ~WorkerProcess();
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;

    void send(const void* data, size_t size);
    void submit(const Round& round, const std::vector<uint32_t>& pages);
    void ask_to_exit();
    void signal(int number);
    pid_t pid() const { return pid_; }

    // Bytes of messages that have arrived and are waiting to be received.
    size_t bytes_waiting() const;

    // The next message, which must be of this type; waits for it. An Error message's text becomes the failure's.
    Ready receive_ready();
    Done receive_done();
    std::string receive_error();

    // What a dying trainer does.
    void close_socket();

    // Waits for the end and returns the exit status, or minus the number of the signal that killed it.
    int wait();

  private:
    std::string receive();

    pid_t pid_ = -1;
    int socket_ = -1;
};

// A round that is replayed, without look-ahead.
Round round_of(uint32_t block, int64_t round_id, int64_t first_step, uint32_t n_steps, uint32_t publish_buffer);

// Runs the worker with `arguments` alone and returns what it printed on both standard streams; stores the exit status.
std::string output_of_worker(const std::vector<std::string>& arguments, int& status);

}  // namespace zenflow::test
