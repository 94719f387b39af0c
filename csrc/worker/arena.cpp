#include "worker/arena.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "common/error.h"
#include "common/parallel.h"

namespace zenflow {
namespace {

void check_scalars(const ArenaHeader& header, uint64_t file_bytes) {
    ZENFLOW_CHECK(header.magic == kMagic);
    require(header.version == kVersion, "arena: version must be ", kVersion, ", got ", header.version,
            ": trainer and worker are of different releases; reinstall lightning-zenflow");
    ZENFLOW_CHECK(header.total_bytes >= kHeaderBytes && header.total_bytes <= file_bytes);
    ZENFLOW_CHECK(header.model_dtype <= static_cast<uint32_t>(DataType::kFloat16));
    const auto moments = static_cast<DataType>(header.moments_dtype);
    ZENFLOW_CHECK(moments == DataType::kFloat32 || moments == DataType::kBFloat16 || moments == DataType::kInt8);
    // The count of the step before is read while a step's own is written.
    ZENFLOW_CHECK(header.n_step_records >= 2);
    ZENFLOW_CHECK(header.n_journal_entries >= 1);
    const uint64_t record_bytes = sizeof(StepRecord) + 2 * uint64_t{header.n_param_groups} * sizeof(Hyperparameters);
    ZENFLOW_CHECK(header.step_record_bytes >= record_bytes && header.step_record_bytes % alignof(StepRecord) == 0);
    ZENFLOW_CHECK(header.resolved_step >= 0);
    // Keeps the size of a slot below 2^64.
    ZENFLOW_CHECK(header.slot_numel <= header.total_bytes);
}

void check_regions(const ArenaHeader& header) {
    const uint64_t model_bytes = element_bytes(static_cast<DataType>(header.model_dtype));
    const uint64_t moment_bytes = element_bytes(static_cast<DataType>(header.moments_dtype));
    const uint64_t slot_bytes = std::max<uint64_t>(header.slot_numel, 1) * model_bytes;
    // Name, offset, number and bytes of entries, alignment; in the order of the offsets.
    const std::tuple<const char*, uint64_t, uint64_t, uint64_t, uint64_t> regions[] = {
        {"ranges", header.ranges_offset, header.n_ranges, sizeof(Range), alignof(Range)},
        {"blocks", header.blocks_offset, header.n_blocks, sizeof(Block), alignof(Block)},
        {"step_records", header.step_records_offset, header.n_step_records, header.step_record_bytes, alignof(StepRecord)},
        {"block_words", header.block_words_offset, header.n_blocks, sizeof(StepWord), alignof(StepWord)},
        {"block_jobs", header.block_jobs_offset, header.n_blocks, sizeof(int64_t), alignof(int64_t)},
        {"block_shown", header.block_shown_offset, header.n_blocks, sizeof(BlockShown), alignof(BlockShown)},
        {"journal", header.journal_offset, header.n_journal_entries, sizeof(JournalEntry), alignof(JournalEntry)},
        {"master", header.master_offset, header.numel, sizeof(float), alignof(float)},
        {"exp_avg", header.exp_avg_offset, header.numel, moment_bytes, moment_bytes},
        {"exp_avg_sq", header.exp_avg_sq_offset, header.numel, moment_bytes, moment_bytes},
        {"scales", header.scales_offset, header.n_scales, sizeof(MomentScales), alignof(MomentScales)},
        {"slots", header.slots_offset, header.n_slots, slot_bytes, model_bytes},
        {"publish", header.publish_offset, header.n_publish_buffers, slot_bytes, model_bytes},
    };
    uint64_t end = kHeaderBytes;
    for (const auto& [name, offset, count, entry_bytes, alignment] : regions) {
        const bool is_inside = offset >= end && offset <= header.total_bytes && offset % alignment == 0 &&
                               count <= (header.total_bytes - offset) / entry_bytes;
        require(is_inside, "invalid input: arena: ", name);
        end = offset + count * entry_bytes;
    }
}

// Entries are in the partition, and none begins before the end of the one before.
template <typename Entry>
void check_order(const std::vector<Entry>& entries, uint64_t numel) {
    uint64_t previous_end = 0;
    for (const Entry& entry : entries) {
        ZENFLOW_CHECK(entry.begin >= previous_end && entry.begin <= entry.end && entry.end <= numel);
        previous_end = entry.end;
    }
}

// Reading allocates a page as well, because the mapping is a shared one of a file.
void touch_pages(const void* first, const void* last) {
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto end = reinterpret_cast<uintptr_t>(last);
    for (auto at = reinterpret_cast<uintptr_t>(first); at < end; at = (at / page_bytes + 1) * page_bytes) {
        static_cast<void>(*reinterpret_cast<const volatile std::byte*>(at));
    }
}

}  // namespace

size_t element_bytes(DataType type) {
    if (type == DataType::kInt8) return 1;
    return type == DataType::kFloat32 ? 4 : 2;
}

Mapping::Mapping(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0) fail("arena: ", std::strerror(errno));
    n_bytes = static_cast<uint64_t>(status.st_size);
    ZENFLOW_CHECK(n_bytes >= kHeaderBytes);
    void* const mapped = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) fail("cannot map the arena's ", n_bytes, " bytes: ", std::strerror(errno));
    madvise(mapped, n_bytes, MADV_DONTDUMP);  // a dump of a failed process would have all states in it
    memory = static_cast<std::byte*>(mapped);
}

Mapping::~Mapping() { munmap(memory, n_bytes); }

Arena::Arena(int fd) : mapping_(fd), header_(live()) {
    check_scalars(header_, mapping_.n_bytes);
    check_regions(header_);
    ranges_.assign(at<Range>(header_.ranges_offset), at<Range>(header_.ranges_offset) + header_.n_ranges);
    blocks_.assign(at<Block>(header_.blocks_offset), at<Block>(header_.blocks_offset) + header_.n_blocks);
    check_tables();
}

void Arena::check_tables() const {
    check_order(ranges_, header_.numel);
    check_order(blocks_, header_.numel);
    for (const Range& range : ranges_) ZENFLOW_CHECK(range.param_group < header_.n_param_groups && range.n_missed >= 0);
    for (const Block& block : blocks_) ZENFLOW_CHECK(block.end - block.begin <= header_.slot_numel);
    if (moments_dtype() == DataType::kInt8) check_scales();
}

// Of a tile, another range must have no part.
void Arena::check_scales() const {
    uint64_t n_before = 0;
    auto block = blocks_.begin();
    for (const Range& range : ranges_) {
        while (block != blocks_.end() && block->end <= range.begin) ++block;
        ZENFLOW_CHECK(block == blocks_.end() || range.end <= (range.begin < block->begin ? block->begin : block->end));
        const uint64_t n = (range.end - range.begin + kTileElements - 1) / kTileElements;
        ZENFLOW_CHECK(range.first_scale >= n_before && n <= header_.n_scales && range.first_scale <= header_.n_scales - n);
        n_before = range.first_scale + n;
    }
}

AnyState Arena::state(uint64_t element, uint64_t scale) const {
    const uint64_t offset = element * element_bytes(moments_dtype());
    return {master() + element, memory_ + header_.exp_avg_offset + offset, memory_ + header_.exp_avg_sq_offset + offset,
            at<MomentScales>(header_.scales_offset) + scale};
}

const std::byte* Arena::slot(uint32_t index) const {
    return memory_ + header_.slots_offset + index * header_.slot_numel * element_bytes(model_dtype());
}

std::byte* Arena::publish_buffer(uint32_t index) const {
    return memory_ + header_.publish_offset + index * header_.slot_numel * element_bytes(model_dtype());
}

StepRecord& Arena::step_record(int64_t step) const {
    const uint64_t index = static_cast<uint64_t>(step) % header_.n_step_records;
    return *at<StepRecord>(header_.step_records_offset + index * header_.step_record_bytes);
}

const Hyperparameters& Arena::hyperparameters(int64_t step, uint32_t param_group, bool tentative) const {
    const auto* const sets = reinterpret_cast<const Hyperparameters*>(&step_record(step) + 1);
    return sets[(tentative ? header_.n_param_groups : 0) + param_group];
}

void Arena::touch_states() const {
    // Of the scales, a hundredth of the states, the first job allocates the pages.
    const uint64_t moment_bytes = element_bytes(moments_dtype());
    for (const auto& [begin, end] : blocks_) {
        for (const auto& [offset, bytes] : {std::pair{header_.master_offset, uint64_t{sizeof(float)}},
                                            {header_.exp_avg_offset, moment_bytes},
                                            {header_.exp_avg_sq_offset, moment_bytes}}) {
            if (begin < end) touch({0, 0, 0, offset + begin * bytes, 1, (end - begin) * bytes});
        }
    }
}

void Arena::touch(const Touch& request) const {
    const uint64_t total = header_.total_bytes;
    ZENFLOW_CHECK(request.offset <= total && request.row_bytes >= 1 &&
                  request.n_rows <= (total - request.offset) / request.row_bytes);
    const auto* const begin = at<const std::byte>(request.offset);
    run_in_parallel([&](int thread, int n_threads) {
        const auto i = static_cast<uint64_t>(thread), n = static_cast<uint64_t>(n_threads);
        for (uint64_t row = 0; row < request.n_rows; ++row) {
            const std::byte* const first = begin + row * request.row_bytes;
            // As BlockReplay divides a block.
            touch_pages(first + request.row_bytes * i / n, first + request.row_bytes * (i + 1) / n);
        }
    });
}

}  // namespace zenflow
