// The worker's view of the memory it shares with the trainer; see protocol.h for the layout and who may touch what when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol.h"

namespace zenflow {

size_t element_bytes(DataType type);

// Maps the arena for as long as the object lives. Header and tables are checked and copied once, so that nothing the trainer
// writes later can lead outside the mapping. The accessors are thread-safe; they hand out shared memory, for which the ownership
// rules of protocol.h hold, and expect indexes within the header's bounds.
class Arena {
  public:
    // Maps the whole arena from its file descriptor, which stays the caller's and may be closed afterwards. Writes nothing.
    // Throws Error that names the field, its value and what is allowed.
    explicit Arena(int fd);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // As it was when the arena was mapped; the fields that change are read below.
    const ArenaHeader& header() const { return header_; }
    const std::vector<Range>& ranges() const { return ranges_; }
    const std::vector<Block>& blocks() const { return blocks_; }
    DataType gradient_dtype() const { return static_cast<DataType>(header_.gradient_dtype); }
    DataType weight_dtype() const { return static_cast<DataType>(header_.weight_dtype); }

    float* master() const { return at<float>(header_.master_offset); }
    float* exp_avg() const { return at<float>(header_.exp_avg_offset); }
    float* exp_avg_sq() const { return at<float>(header_.exp_avg_sq_offset); }
    const std::byte* page(uint32_t index) const;
    std::byte* publish_buffer(uint32_t index) const;

    // The record in which `step` (not negative) lives, whichever step it holds now.
    StepRecord& step_record(int64_t step) const;
    const StepWord& block_word(uint32_t block) const { return at<StepWord>(header_.block_words_offset)[block]; }
    const Hyperparameters& hyperparameters(int64_t step, uint32_t param_group) const;

    int64_t& resolved_step() const { return at<ArenaHeader>(0)->resolved_step; }
    int64_t& begun_round() const { return at<ArenaHeader>(0)->begun_round; }
    int64_t& completed_round() const { return at<ArenaHeader>(0)->completed_round; }
    uint64_t& n_shares() const { return at<ArenaHeader>(0)->n_shares; }
    JournalSlot& journal_slot(uint64_t index) const { return at<JournalSlot>(header_.journal_offset)[index]; }

  private:
    template <typename T>
    T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(memory_ + offset);
    }

    void check_tables() const;

    std::byte* memory_ = nullptr;
    size_t mapped_bytes_ = 0;
    ArenaHeader header_{};
    std::vector<Range> ranges_;
    std::vector<Block> blocks_;
};

}  // namespace zenflow
