// The trainer's side of an arena, reduced to what the tests need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/protocol.h"
#include "reference_adamw.h"

namespace zenflow::test {

struct ArenaSpec {
    std::vector<Range> ranges = {{0, 40, 0, 0}, {48, 100, 1, 0}};
    std::vector<Block> blocks = {{0, 64}, {64, 100}};
    uint64_t numel = 100;
    uint32_t n_param_groups = 2;
    uint32_t n_step_records = 4;
    uint32_t n_slots = 6;
    uint32_t n_publish_buffers = 2;
    uint32_t n_journal_entries = 3;
    uint64_t export_bytes = 4096;
    DataType moments_dtype = DataType::kFloat32;
    DataType model_dtype = DataType::kFloat32;
};

// Owns a memfd, with header and tables filled in and zeros elsewhere, and its mapping.
class TrainerArena {
  public:
    explicit TrainerArena(const ArenaSpec& spec = {});
    ~TrainerArena();
    TrainerArena(const TrainerArena&) = delete;
    TrainerArena& operator=(const TrainerArena&) = delete;

    int fd() const { return fd_; }
    size_t bytes() const { return bytes_; }
    std::byte* memory() { return memory_; }
    const ArenaSpec& spec() const { return spec_; }
    ArenaHeader& header() { return *at<ArenaHeader>(0); }
    Range* ranges() { return at<Range>(header().ranges_offset); }
    Block* blocks() { return at<Block>(header().blocks_offset); }
    float* master() { return at<float>(header().master_offset); }
    State read_state();  // a copy, with moments of any type; 0 where there are no codes
    std::byte* slot(uint32_t index);
    std::byte* publish_buffer(uint32_t index);
    StepRecord& record(int64_t step);
    Hyperparameters& hyperparameters(int64_t step, uint32_t param_group);
    Hyperparameters& tentative_hyperparameters(int64_t step, uint32_t param_group);
    std::byte* export_section() { return memory_ + header().export_offset; }
    int64_t& completed_job_of(uint32_t block) { return at<int64_t>(header().block_jobs_offset)[block]; }
    BlockShown& block_shown(uint32_t block) { return at<BlockShown>(header().block_shown_offset)[block]; }
    JournalEntry& journal_entry(size_t index) { return at<JournalEntry>(header().journal_offset)[index]; }

    void set_state(const State& state);  // moments rounded as a job would
    // Both sets of a step.
    void set_hyperparameters(int64_t step, const std::vector<Hyperparameters>& param_groups);
    void set_gradient(uint32_t slot, const std::vector<float>& values);

    // As the device does, the sequence number last, with release semantics. The second is a block's word.
    void write_word(int64_t step, float clip);
    void write_block_word(uint32_t block, int64_t step, float clip);

    // Applies the step with number `step`, whose gradient in the block is `gradient`, to the expected state.
    void expect_step(State& expected, uint32_t block, int64_t step, const std::vector<float>& gradient, int64_t count, float clip,
                     bool tentative = false);

    // Rounds the block's moments in the expected state as a job does whose last committed step is `step`.
    void expect_rounded(State& expected, uint32_t block, int64_t step);

    // The block's new weights, in the ranges.
    void check_published(uint32_t block, uint32_t publish_buffer, const State& expected);

  private:
    // Calls `visit(begin, end, exp_avg, exp_avg_sq, scales)` for elements that begin with a tile.
    template <typename Visit>
    void for_parts(const Visit& visit);

    // The block's elements without padding.
    std::vector<Range> ranges_of(uint32_t block) const;

    template <typename T>
    T* at(uint64_t offset) {
        return reinterpret_cast<T*>(memory_ + offset);
    }

    ArenaSpec spec_;
    int fd_ = -1;
    size_t bytes_ = 0;
    std::byte* memory_ = nullptr;
};

// A job that commits one step per slot, without prediction.
UpdateJob job_of(uint32_t block, int64_t job_id, int64_t first_step, uint32_t n_steps, uint32_t publish_buffer = 0);

// The same with a tentative last step.
UpdateJob tentative(UpdateJob job, Tentative kind = Tentative::kPredicted);

}  // namespace zenflow::test
