// The trainer's side of an arena, as small as a test needs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol.h"

namespace zenflow::test {

struct ArenaSpec {
    std::vector<Range> ranges = {{0, 40, 0, 0}, {48, 100, 1, 0}};
    std::vector<Block> blocks = {{0, 64}, {64, 100}};
    uint64_t numel = 100;
    uint32_t n_param_groups = 2;
    uint32_t n_step_records = 4;
    uint32_t n_pages = 6;
    uint32_t n_publish_buffers = 2;
    uint32_t n_journal_slots = 3;
    DataType gradient_dtype = DataType::kFloat32;
    DataType weight_dtype = DataType::kFloat32;
};

// A memfd with header and tables filled in and everything else zero. Owns the file and its own mapping.
class TrainerArena {
  public:
    explicit TrainerArena(const ArenaSpec& spec);
    ~TrainerArena();
    TrainerArena(const TrainerArena&) = delete;
    TrainerArena& operator=(const TrainerArena&) = delete;

    int fd() const { return fd_; }
    ArenaHeader& header() { return *at<ArenaHeader>(0); }
    Range* ranges() { return at<Range>(header().ranges_offset); }
    Block* blocks() { return at<Block>(header().blocks_offset); }
    float* master() { return at<float>(header().master_offset); }
    float* exp_avg() { return at<float>(header().exp_avg_offset); }
    float* exp_avg_sq() { return at<float>(header().exp_avg_sq_offset); }
    std::byte* page(uint32_t index);
    std::byte* publish_buffer(uint32_t index);
    StepRecord& record(int64_t step);
    Hyperparameters& hyperparameters(int64_t step, uint32_t param_group);
    JournalSlot& journal_slot(size_t index) { return at<JournalSlot>(header().journal_offset)[index]; }
    size_t bytes() const { return bytes_; }
    std::byte* memory() { return memory_; }

    // The step's word as the device writes it: clip coefficient first, then, for all to see, the sequence number.
    void write_word(int64_t step, float clip);
    // The same of a block in a step, for an early round.
    void write_block_word(uint32_t block, int64_t step, float clip);

  private:
    template <typename T>
    T* at(uint64_t offset) {
        return reinterpret_cast<T*>(memory_ + offset);
    }

    int fd_ = -1;
    size_t bytes_ = 0;
    std::byte* memory_ = nullptr;
};

}  // namespace zenflow::test
