// The trainer's side of an arena, reduced to what the tests need; and what a job should do, by one call of the kernel for each
// range, which test_kernel.py compares with AdamW in Python.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "adamw/replay_adamw.h"
#include "adamw/stochastic_rounding.h"
#include "adamw/tile_journal.h"
#include "check.h"
#include "common/half.h"
#include "common/protocol.h"
#include "worker/arena.h"
#include "worker/step_records.h"

namespace zenflow::test {

constexpr Hyperparameters kDecoupled{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
constexpr Hyperparameters kGradientDecay{1e-3, 0.8, 0.95, 1e-6, 0.1, 0, 0};

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
};

// The parts of the ranges in a block; `first_scale` of each is that of its range.
inline std::vector<Range> ranges_of(const std::vector<Range>& ranges, const Block& block) {
    std::vector<Range> result;
    for (Range range : ranges) {
        range.begin = std::max(range.begin, block.begin), range.end = std::min(range.end, block.end);
        if (range.begin < range.end) result.push_back(range);
    }
    return result;
}

inline uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A memfd with header and tables filled in and zeros elsewhere.
inline int make_file(const ArenaSpec& spec) {
    std::vector<Range> ranges = spec.ranges;
    ArenaHeader header{};
    if (spec.moments_dtype == DataType::kInt8) {
        // The ranges as parts of the blocks, each with its first scale.
        ranges.clear();
        for (const Block& block : spec.blocks) {
            for (Range& part : ranges_of(spec.ranges, block)) {
                part.first_scale = static_cast<uint32_t>(header.n_scales);
                header.n_scales += round_up(part.end - part.begin, kTileElements) / kTileElements;
                ranges.push_back(part);
            }
        }
    }
    header.magic = kMagic;
    header.version = kVersion;
    header.model_dtype = static_cast<uint32_t>(spec.model_dtype);
    header.moments_dtype = static_cast<uint32_t>(spec.moments_dtype);
    header.numel = spec.numel;
    header.n_ranges = static_cast<uint32_t>(ranges.size());
    header.n_blocks = static_cast<uint32_t>(spec.blocks.size());
    header.n_param_groups = spec.n_param_groups;
    header.n_step_records = spec.n_step_records;
    header.n_slots = spec.n_slots;
    header.n_publish_buffers = spec.n_publish_buffers;
    header.n_journal_entries = spec.n_journal_entries;
    for (const Block& block : spec.blocks) header.slot_numel = std::max(header.slot_numel, block.end - block.begin);
    header.step_record_bytes = sizeof(StepRecord) + 2 * spec.n_param_groups * sizeof(Hyperparameters);
    header.total_bytes = kHeaderBytes;
    const auto place = [&header](uint64_t& offset, uint64_t n, uint64_t entry_bytes) {
        offset = header.total_bytes;
        header.total_bytes = round_up(offset + n * entry_bytes, 64);
    };
    const uint64_t moment_bytes = element_bytes(spec.moments_dtype), model_bytes = element_bytes(spec.model_dtype);
    place(header.ranges_offset, ranges.size(), sizeof(Range));
    place(header.blocks_offset, header.n_blocks, sizeof(Block));
    place(header.step_records_offset, header.n_step_records, header.step_record_bytes);
    place(header.block_words_offset, header.n_blocks, sizeof(StepWord));
    place(header.block_jobs_offset, header.n_blocks, sizeof(int64_t));
    place(header.block_shown_offset, header.n_blocks, sizeof(BlockShown));
    place(header.journal_offset, header.n_journal_entries, sizeof(JournalEntry));
    place(header.master_offset, header.numel, sizeof(float));
    place(header.exp_avg_offset, header.numel, moment_bytes);
    place(header.exp_avg_sq_offset, header.numel, moment_bytes);
    place(header.scales_offset, header.n_scales, sizeof(MomentScales));
    place(header.slots_offset, header.n_slots, header.slot_numel * model_bytes);
    place(header.publish_offset, header.n_publish_buffers, header.slot_numel * model_bytes);
    const int fd = memfd_create("zenflow-test-arena", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(fd, static_cast<off_t>(header.total_bytes)), 0);
    const auto write = [fd](const void* data, size_t size, uint64_t offset) {
        CHECK_EQ(pwrite(fd, data, size, static_cast<off_t>(offset)), static_cast<ssize_t>(size));
    };
    write(&header, sizeof(header), 0);
    write(ranges.data(), ranges.size() * sizeof(Range), header.ranges_offset);
    write(spec.blocks.data(), spec.blocks.size() * sizeof(Block), header.blocks_offset);
    return fd;
}

// Owns the file, and maps it as the worker does.
class TrainerArena : public Arena {
  public:
    explicit TrainerArena(const ArenaSpec& spec = {}) : TrainerArena(make_file(spec), 0) {}
    ~TrainerArena() { close(fd_); }

    int fd() const { return fd_; }
    size_t n_bytes() const { return header().total_bytes; }
    std::byte* memory() const { return at<std::byte>(0); }
    void copy(const TrainerArena& other) { std::memcpy(memory(), other.memory(), n_bytes()); }
    // Whether states, gradients and published weights are the same.
    bool equals(const TrainerArena& other) const {
        const uint64_t begin = header().master_offset;
        return std::memcmp(memory() + begin, other.memory() + begin, n_bytes() - begin) == 0;
    }
    Hyperparameters& hyperparameters(int64_t step, uint32_t param_group, bool tentative = false) {
        return const_cast<Hyperparameters&>(Arena::hyperparameters(step, param_group, tentative));
    }
    // Both sets of a step.
    void set_hyperparameters(int64_t step, const Hyperparameters& first, const Hyperparameters& second) {
        for (const bool tentative : {false, true}) {
            hyperparameters(step, 0, tentative) = first;
            hyperparameters(step, 1, tentative) = second;
        }
    }

    // Plausible master weights and moments, with some zeros among them.
    void set_random_state(uint32_t seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        const uint64_t n = header().numel;
        const AnyState all = state(0, 0);
        for (uint64_t i = 0; i < n; ++i) {
            all.master[i] = 0.02f * normal(random);
            const float m = i % 11 == 3 ? 0.0f : 1e-3f * normal(random), root = i % 13 == 5 ? 0.0f : 1e-3f * normal(random);
            if (moments_dtype() == DataType::kInt8) {
                static_cast<int8_t*>(all.exp_avg)[i] = static_cast<int8_t>(random() % 255 - 127);
                static_cast<uint8_t*>(all.exp_avg_sq)[i] = static_cast<uint8_t>(1 + random() % 255);
            } else {
                store(all.exp_avg, i, m, moments_dtype());
                store(all.exp_avg_sq, i, root * root, moments_dtype());
            }
        }
        for (uint64_t i = 0; i < header().n_scales; ++i) all.scales[i] = {2.0f, 1e-6f};
    }

    void set_gradient(uint32_t slot_index, uint32_t seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        void* const gradient = const_cast<std::byte*>(slot(slot_index));
        for (uint64_t i = 0; i < header().slot_numel; ++i) store(gradient, i, 1e-2f * normal(random), model_dtype());
    }

    // As the device does, the sequence number last, with release semantics. The second is a block's word.
    void write_word(int64_t step, float clip) { write(step_record(step).word, step, clip); }
    void write_block_word(uint32_t block, int64_t step, float clip) {
        write(const_cast<StepWord&>(block_word(block)), step, clip);
    }

    // A step that is applied, with its gradient, its hyperparameters and the count of applied steps.
    struct Applied {
        uint32_t slot;
        int64_t step;
        int64_t count;
        float clip;
        bool of_second_set = false;
    };

    // Does what a job on a block does, in one call for each range. `last_step` is that of the committed part, left out or not.
    void replay(uint32_t block_number, uint32_t buffer, const std::vector<Applied>& steps, int64_t last_step,
                bool has_tentative = false) {
        const Block& block = blocks()[block_number];
        for (const Range& range : ranges_of(ranges(), block)) {
            const uint64_t offset = (range.begin - block.begin) * element_bytes(model_dtype());
            std::vector<const void*> gradients;
            std::vector<StepCoefficients> coefficients;
            for (const Applied& s : steps) {
                const Hyperparameters& h = hyperparameters(s.step, range.param_group, s.of_second_set);
                coefficients.push_back(step_coefficients(h, s.count - range.n_missed, s.clip));
                gradients.push_back(slot(s.slot) + offset);
            }
            const WindowView window{steps.size() - (has_tentative ? 1 : 0),
                                    gradients.data(),
                                    coefficients.data(),
                                    0.0f,
                                    has_tentative,
                                    {noise_seed(static_cast<uint64_t>(last_step)), static_cast<uint32_t>(range.begin)}};
            JournalEntry entry;
            start_at(entry, range.begin);
            replay_kernel(model_dtype(), moments_dtype(), InstructionSet::kBaseline)(
                state(range.begin, range.first_scale), range.end - range.begin, window, publish_buffer(buffer) + offset, entry);
        }
    }

  private:
    TrainerArena(int fd, int) : Arena(fd), fd_(fd) {}

    static void store(void* array, uint64_t i, float value, DataType type) {
        with_type(type, [=](auto zero) { static_cast<decltype(zero)*>(array)[i] = from_float<decltype(zero)>(value); });
    }
    static void write(StepWord& word, int64_t step, float clip) {
        word.clip = clip;
        word.check = check_of(clip, step);
        __atomic_store_n(&word.sequence, step, __ATOMIC_RELEASE);
    }

    const int fd_;
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
