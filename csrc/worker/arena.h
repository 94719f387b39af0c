// The worker's mapping of the shared memory; see protocol.h for its layout and ownership.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "adamw/replay_adamw.h"
#include "common/protocol.h"

namespace zenflow {

size_t element_bytes(DataType type);

// All bytes of a file in memory. Throws Error.
struct Mapping {
    explicit Mapping(int fd);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    uint64_t n_bytes = 0;
    std::byte* memory = nullptr;
};

// Owns the mapping. Header and tables are checked and copied once, so that no later write of the trainer can make the worker
// leave the mapping. The accessors are thread-safe; the memory that they return has the owners that protocol.h names. Indices
// must be within the header's bounds.
class Arena {
  public:
    // Maps the whole file, whose descriptor stays the caller's and may be closed afterwards. Writes nothing. Throws Error.
    explicit Arena(int fd);

    // A copy from when the arena was mapped, and the header itself, for the fields that change.
    const ArenaHeader& header() const { return header_; }
    ArenaHeader& live() const { return *at<ArenaHeader>(0); }
    const std::vector<Range>& ranges() const { return ranges_; }
    const std::vector<Block>& blocks() const { return blocks_; }
    DataType model_dtype() const { return static_cast<DataType>(header_.model_dtype); }
    DataType moments_dtype() const { return static_cast<DataType>(header_.moments_dtype); }

    float* master() const { return at<float>(header_.master_offset); }
    // From `element` on, whose tile has the scales with index `scale`, if moments have any.
    AnyState state(uint64_t element, uint64_t scale) const;
    const std::byte* slot(uint32_t index) const;
    std::byte* publish_buffer(uint32_t index) const;

    // The ring's record for `step` (not negative), whichever step it currently holds.
    StepRecord& step_record(int64_t step) const;
    const StepWord& block_word(uint32_t block) const { return at<StepWord>(header_.block_words_offset)[block]; }
    // Of the record's first set, or of the second one, of the tentative step.
    const Hyperparameters& hyperparameters(int64_t step, uint32_t param_group, bool tentative = false) const;

    int64_t& completed_job_of(uint32_t block) const { return at<int64_t>(header_.block_jobs_offset)[block]; }
    BlockShown& block_shown(uint32_t block) const { return at<BlockShown>(header_.block_shown_offset)[block]; }
    JournalEntry& journal_entry(uint64_t index) const { return at<JournalEntry>(header_.journal_offset)[index]; }

    // Makes the kernel allocate the pages of all blocks' master weights and moments on the NUMA nodes of the threads that will
    // update them, those of the caller's next parallel region. Only reads; pages that are allocated already stay where they are.
    void touch_states() const;
    // Carries out a Touch with these threads. Throws Error if it leaves the arena.
    void touch(const Touch& request) const;

    // Of memory at a checked offset in bytes.
    template <typename T>
    T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(memory_ + offset);
    }

  private:
    void check_tables() const;
    void check_scales() const;

    const Mapping mapping_;
    std::byte* const memory_ = mapping_.memory;
    ArenaHeader header_{};
    std::vector<Range> ranges_;
    std::vector<Block> blocks_;
};

}  // namespace zenflow
