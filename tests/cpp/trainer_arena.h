// The trainer's side of an arena, reduced to what the tests need.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"
#include "common/protocol.h"
#include "reference_adamw.h"
#include "worker/arena.h"
#include "worker/step_records.h"

namespace zenflow::test {

struct ArenaSpec {
    std::vector<Range> ranges = {{0, 40, 0, 0, 0}, {48, 100, 1, 0, 0}};
    std::vector<Block> blocks = {{0, 64}, {64, 100}};
    uint64_t numel = 100;
    uint32_t n_param_groups = 2;
    uint32_t n_step_records = 4;
    uint32_t n_slots = 6;
    uint32_t n_publish_buffers = 2;
    uint32_t n_journal_entries = 3;
    DataType moments_dtype = DataType::kFloat32;
    DataType model_dtype = DataType::kFloat32;

    // The block's elements without padding.
    std::vector<Range> ranges_of(const Block& block) const {
        std::vector<Range> result;
        for (const Range& range : ranges) {
            const uint64_t begin = std::max(range.begin, block.begin), end = std::min(range.end, block.end);
            if (begin < end) result.push_back({begin, end, range.param_group, range.first_scale, range.n_missed});
        }
        return result;
    }
};

inline uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Owns a memfd, with header and tables filled in and zeros elsewhere, and its mapping.
class TrainerArena {
  public:
    explicit TrainerArena(const ArenaSpec& given = {}) : spec_(given) {
        uint64_t n_scales = 0;
        if (given.moments_dtype == DataType::kInt8) {
            // The ranges as parts of the blocks, each with its first scale.
            spec_.ranges.clear();
            for (const Block& block : given.blocks) {
                for (Range& part : given.ranges_of(block)) {
                    part.first_scale = static_cast<uint32_t>(n_scales);
                    n_scales += (part.end - part.begin + kTileElements - 1) / kTileElements;
                    spec_.ranges.push_back(part);
                }
            }
        }
        const ArenaSpec& spec = spec_;
        ArenaHeader header{};
        header.magic = kMagic;
        header.version = kVersion;
        header.model_dtype = static_cast<uint32_t>(spec.model_dtype);
        header.moments_dtype = static_cast<uint32_t>(spec.moments_dtype);
        header.numel = spec.numel;
        header.n_scales = n_scales;
        header.n_ranges = static_cast<uint32_t>(spec.ranges.size());
        header.n_blocks = static_cast<uint32_t>(spec.blocks.size());
        header.n_param_groups = spec.n_param_groups;
        header.n_step_records = spec.n_step_records;
        header.n_slots = spec.n_slots;
        header.n_publish_buffers = spec.n_publish_buffers;
        header.n_journal_entries = spec.n_journal_entries;
        uint64_t largest_block = 0;
        for (const Block& block : spec.blocks) largest_block = std::max(largest_block, block.end - block.begin);
        header.slot_numel = round_up(largest_block, 64);
        header.step_record_bytes = round_up(sizeof(StepRecord) + 2 * spec.n_param_groups * sizeof(Hyperparameters), 64);

        bytes_ = kHeaderBytes;
        const auto reserve = [this](uint64_t bytes) {
            const uint64_t begin = bytes_;
            bytes_ = round_up(bytes_ + bytes, 64);
            return begin;
        };
        header.ranges_offset = reserve(spec.ranges.size() * sizeof(Range));
        header.blocks_offset = reserve(spec.blocks.size() * sizeof(Block));
        header.step_records_offset = reserve(spec.n_step_records * header.step_record_bytes);
        header.master_offset = reserve(spec.numel * sizeof(float));
        header.exp_avg_offset = reserve(spec.numel * element_bytes(spec.moments_dtype));
        header.exp_avg_sq_offset = reserve(spec.numel * element_bytes(spec.moments_dtype));
        header.scales_offset = reserve(n_scales * sizeof(MomentScales));
        header.slots_offset = reserve(spec.n_slots * header.slot_numel * element_bytes(spec.model_dtype));
        header.publish_offset = reserve(spec.n_publish_buffers * header.slot_numel * element_bytes(spec.model_dtype));
        header.journal_offset = reserve(spec.n_journal_entries * sizeof(JournalEntry));
        header.block_words_offset = reserve(spec.blocks.size() * sizeof(StepWord));
        header.block_jobs_offset = reserve(spec.blocks.size() * sizeof(int64_t));
        header.block_shown_offset = reserve(spec.blocks.size() * sizeof(BlockShown));
        header.total_bytes = bytes_;

        fd_ = memfd_create("zenflow-test-arena", MFD_CLOEXEC);
        CHECK(fd_ >= 0);
        CHECK_EQ(ftruncate(fd_, static_cast<off_t>(bytes_)), 0);
        void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
        CHECK(memory != MAP_FAILED);
        memory_ = static_cast<std::byte*>(memory);
        this->header() = header;
        std::copy(spec.ranges.begin(), spec.ranges.end(), ranges());
        std::copy(spec.blocks.begin(), spec.blocks.end(), blocks());
    }
    ~TrainerArena() {
        munmap(memory_, bytes_);
        close(fd_);
    }
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
    std::byte* slot(uint32_t index) { return row(header().slots_offset, index); }
    std::byte* publish_buffer(uint32_t index) { return row(header().publish_offset, index); }
    StepRecord& record(int64_t step) {
        const uint64_t index = static_cast<uint64_t>(step) % header().n_step_records;
        return *at<StepRecord>(header().step_records_offset + index * header().step_record_bytes);
    }
    Hyperparameters& hyperparameters(int64_t step, uint32_t param_group) {
        return reinterpret_cast<Hyperparameters*>(&record(step) + 1)[param_group];
    }
    Hyperparameters& tentative_hyperparameters(int64_t step, uint32_t param_group) {
        return hyperparameters(step, header().n_param_groups + param_group);
    }
    int64_t& completed_job_of(uint32_t block) { return at<int64_t>(header().block_jobs_offset)[block]; }
    JournalEntry& journal_entry(size_t index) { return at<JournalEntry>(header().journal_offset)[index]; }

    // A copy, with moments of any type; 0 where there are no codes.
    State read_state() {
        const size_t n = spec_.numel;
        State state{{master(), master() + n}, std::vector<float>(n), std::vector<float>(n)};
        for_parts([&](uint64_t begin, uint64_t end, std::byte* exp_avg, std::byte* exp_avg_sq, MomentScales* scales) {
            load_moments(state, begin, end, exp_avg, exp_avg_sq, scales, spec_.moments_dtype);
        });
        return state;
    }

    // With moments rounded as a job would.
    void set_state(const State& values) {
        std::copy(values.master.begin(), values.master.end(), master());
        for_parts([&](uint64_t begin, uint64_t end, std::byte* exp_avg, std::byte* exp_avg_sq, MomentScales* scales) {
            State rounded = values;
            round_moments(rounded, 1, begin, end, spec_.moments_dtype);
            const StoredMoments stored = store_moments(rounded, begin, end, spec_.moments_dtype);
            std::copy(stored.exp_avg.begin(), stored.exp_avg.end(), exp_avg);
            std::copy(stored.exp_avg_sq.begin(), stored.exp_avg_sq.end(), exp_avg_sq);
            std::copy(stored.scales.begin(), stored.scales.end(), scales);
        });
    }

    // Both sets of a step.
    void set_hyperparameters(int64_t step, const std::vector<Hyperparameters>& param_groups) {
        std::copy(param_groups.begin(), param_groups.end(), &hyperparameters(step, 0));
        std::copy(param_groups.begin(), param_groups.end(), &tentative_hyperparameters(step, 0));
    }

    void set_gradient(uint32_t index, const std::vector<float>& values) {
        const auto bytes = encode(values, spec_.model_dtype);
        std::copy(bytes.begin(), bytes.end(), slot(index));
    }

    // As the device does, the sequence number last, with release semantics. The second is a block's word.
    void write_word(int64_t step, float clip) { write(record(step).word, step, clip); }
    void write_block_word(uint32_t block, int64_t step, float clip) {
        write(at<StepWord>(header().block_words_offset)[block], step, clip);
    }

    // Applies the step with number `step`, whose gradient in the block is `gradient`, to the expected state.
    void expect_step(State& expected, uint32_t block, int64_t step, const std::vector<float>& gradient, int64_t count, float clip,
                     bool tentative = false) {
        const auto rounded = decode(encode(gradient, spec_.model_dtype).data(), gradient.size(), spec_.model_dtype);
        for (const auto& [begin, end, group, _, n_missed] : ranges_of(block)) {
            const Hyperparameters& h = tentative ? tentative_hyperparameters(step, group) : hyperparameters(step, group);
            const float* const of_range = rounded.data() + (begin - spec_.blocks[block].begin);
            reference_step(expected, of_range, h, count - n_missed, clip, begin, end);
        }
    }

    // Rounds the block's moments in the expected state as a job does whose last committed step is `step`.
    void expect_rounded(State& expected, uint32_t block, int64_t step) {
        for (const Range& range : ranges_of(block)) round_moments(expected, step, range.begin, range.end, spec_.moments_dtype);
    }

    // The block's new weights, in the ranges.
    void check_published(uint32_t block, uint32_t buffer, const State& expected) {
        for (const Range& range : ranges_of(block)) {
            const std::vector<float> weights(expected.master.data() + range.begin, expected.master.data() + range.end);
            const uint64_t offset = (range.begin - spec_.blocks[block].begin) * element_bytes(spec_.model_dtype);
            check_same_bytes("published", publish_buffer(buffer) + offset, weights, spec_.model_dtype);
        }
    }

  private:
    static void write(StepWord& word, int64_t step, float clip) {
        word.clip = clip;
        word.check = check_of(clip, step);
        __atomic_store_n(&word.sequence, step, __ATOMIC_RELEASE);
    }

    // Calls `visit(begin, end, exp_avg, exp_avg_sq, scales)` for elements that begin with a tile.
    template <typename Visit>
    void for_parts(const Visit& visit) {
        const uint64_t bytes = element_bytes(spec_.moments_dtype);
        const auto part = [&](uint64_t begin, uint64_t end, uint64_t scale) {
            visit(begin, end, memory_ + header().exp_avg_offset + begin * bytes,
                  memory_ + header().exp_avg_sq_offset + begin * bytes, at<MomentScales>(header().scales_offset) + scale);
        };
        if (spec_.moments_dtype != DataType::kInt8) return part(0, spec_.numel, 0);
        for (const Range& range : spec_.ranges) part(range.begin, range.end, range.first_scale);
    }

    std::vector<Range> ranges_of(uint32_t block) const { return spec_.ranges_of(spec_.blocks[block]); }

    // Of gradient slots or publish buffers.
    std::byte* row(uint64_t offset, uint32_t index) {
        return memory_ + offset + index * header().slot_numel * element_bytes(spec_.model_dtype);
    }

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
inline UpdateJob job_of(uint32_t block, int64_t job_id, int64_t first_step, uint32_t n_steps, uint32_t publish_buffer = 0) {
    return {static_cast<uint32_t>(MessageType::kJob), block, job_id, first_step, n_steps, publish_buffer, 0.0f, Tentative::kNone};
}

// The same with a tentative last step.
inline UpdateJob tentative(UpdateJob job, Tentative kind = Tentative::kPredicted) {
    --job.n_committed;
    job.tentative = kind;
    return job;
}

}  // namespace zenflow::test
