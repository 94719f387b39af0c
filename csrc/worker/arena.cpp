#include "worker/arena.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.h"

namespace zenflow {
namespace {

constexpr size_t kRecordAlignment = 64;

struct Region {
    const char* offset_name;
    uint64_t offset;
    const char* count_name;
    uint64_t count;  // entries
    uint64_t entry_bytes;
    uint64_t alignment;

    uint64_t end() const { return offset + count * entry_bytes; }
};

void check_scalars(const ArenaHeader& header, uint64_t file_bytes) {
    require(header.magic == kMagic, "arena: magic must be ", kMagic, ", got ", header.magic, ": this is not a ZenFlow arena");
    require(header.version == kVersion, "arena: version must be ", kVersion, ", got ", header.version,
            ": trainer and worker are of different releases; reinstall lightning-zenflow");
    require(header.total_bytes >= kHeaderBytes && header.total_bytes <= file_bytes, "arena: total_bytes must be from ",
            kHeaderBytes, " to the file's size of ", file_bytes, ", got ", header.total_bytes);
    require(header.model_dtype <= static_cast<uint32_t>(DataType::kFloat16),
            "arena: model_dtype must be 0 (float32), 1 (bfloat16) or 2 (float16), got ", header.model_dtype);
    const auto moments = static_cast<DataType>(header.moments_dtype);
    require(moments == DataType::kFloat32 || moments == DataType::kBFloat16 || moments == DataType::kInt8,
            "arena: moments_dtype must be 0 (float32), 1 (bfloat16) or 3 (int8), got ", header.moments_dtype);
    // The count of the step before is read while a step's own is written.
    require(header.n_step_records >= 2, "arena: n_step_records must be at least 2, got ", header.n_step_records);
    require(header.n_journal_entries >= 1, "arena: n_journal_entries must be at least 1, got 0");
    const uint64_t record_bytes = sizeof(StepRecord) + 2 * uint64_t{header.n_param_groups} * sizeof(Hyperparameters);
    const uint64_t rounded_up = (record_bytes + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
    require(header.step_record_bytes == rounded_up, "arena: step_record_bytes must be ", rounded_up,
            " with n_param_groups = ", header.n_param_groups, ", got ", header.step_record_bytes);
    require(header.resolved_step >= 0, "arena: resolved_step must be at least 0, got ", header.resolved_step);
}

void check_region(const Region& region, uint64_t total_bytes) {
    const auto& [offset_name, offset, count_name, count, entry_bytes, alignment] = region;
    require(offset >= kHeaderBytes && offset <= total_bytes && offset % alignment == 0, "arena: ", offset_name,
            " must be a multiple of ", alignment, " from ", kHeaderBytes, " to total_bytes = ", total_bytes, ", got ", offset);
    const uint64_t room = (total_bytes - offset) / entry_bytes;
    require(count <= room, "arena: ", count_name, " must be at most ", room, ", the room from ", offset_name, " = ", offset,
            " to total_bytes = ", total_bytes, ", got ", count);
}

void check_regions(const ArenaHeader& header) {
    const uint64_t model_bytes = element_bytes(static_cast<DataType>(header.model_dtype));
    const uint64_t moment_bytes = element_bytes(static_cast<DataType>(header.moments_dtype));
    // Keeps the size of a slot below 2^64.
    require(header.slot_numel <= header.total_bytes, "arena: slot_numel must be at most total_bytes = ", header.total_bytes,
            ", got ", header.slot_numel);
    const uint64_t slot_numel = std::max<uint64_t>(header.slot_numel, 1);
    std::vector<Region> regions = {
        {"ranges_offset", header.ranges_offset, "n_ranges", header.n_ranges, sizeof(Range), alignof(Range)},
        {"blocks_offset", header.blocks_offset, "n_blocks", header.n_blocks, sizeof(Block), alignof(Block)},
        {"step_records_offset", header.step_records_offset, "n_step_records", header.n_step_records, header.step_record_bytes,
         alignof(StepRecord)},
        {"master_offset", header.master_offset, "numel", header.numel, sizeof(float), alignof(float)},
        {"exp_avg_offset", header.exp_avg_offset, "numel", header.numel, moment_bytes, moment_bytes},
        {"exp_avg_sq_offset", header.exp_avg_sq_offset, "numel", header.numel, moment_bytes, moment_bytes},
        {"scales_offset", header.scales_offset, "n_scales", header.n_scales, sizeof(MomentScales), alignof(MomentScales)},
        {"slots_offset", header.slots_offset, "n_slots", header.n_slots, slot_numel * model_bytes, model_bytes},
        {"publish_offset", header.publish_offset, "n_publish_buffers", header.n_publish_buffers, slot_numel * model_bytes,
         model_bytes},
        {"journal_offset", header.journal_offset, "n_journal_entries", header.n_journal_entries, sizeof(JournalEntry),
         alignof(JournalEntry)},
        {"block_words_offset", header.block_words_offset, "n_blocks", header.n_blocks, sizeof(StepWord), alignof(StepWord)},
        {"block_jobs_offset", header.block_jobs_offset, "n_blocks", header.n_blocks, sizeof(int64_t), alignof(int64_t)},
        {"block_shown_offset", header.block_shown_offset, "n_blocks", header.n_blocks, sizeof(BlockShown), alignof(BlockShown)},
    };
    for (const Region& region : regions) check_region(region, header.total_bytes);

    regions.erase(std::remove_if(regions.begin(), regions.end(), [](const Region& region) { return region.count == 0; }),
                  regions.end());
    std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.offset < b.offset; });
    for (size_t i = 1; i < regions.size(); ++i) {
        const Region& previous = regions[i - 1];
        require(regions[i].offset >= previous.end(), "arena: ", regions[i].offset_name, " must be at least ", previous.end(),
                ", the end of what begins at ", previous.offset_name, " = ", previous.offset, ", got ", regions[i].offset);
    }
}

// Checks that an entry is in the partition and does not begin before its predecessor's end.
template <typename Entry>
void check_order(const char* table, size_t index, const std::vector<Entry>& entries, uint64_t numel) {
    const Entry& entry = entries[index];
    const uint64_t previous_end = index == 0 ? 0 : entries[index - 1].end;
    require(entry.begin >= previous_end && entry.begin <= entry.end && entry.end <= numel, "arena: ", table, "[", index,
            "] must have ascending bounds from the predecessor's end, ", previous_end, ", to numel = ", numel, ", got [",
            entry.begin, ", ", entry.end, ")");
}

}  // namespace

size_t element_bytes(DataType type) {
    if (type == DataType::kInt8) return 1;
    return type == DataType::kFloat32 ? 4 : 2;
}

Arena::Arena(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0) fail("--arena-fd must be an open file, got ", fd, ": ", std::strerror(errno));
    const auto file_bytes = static_cast<uint64_t>(status.st_size);
    require(file_bytes >= kHeaderBytes, "--arena-fd must be a file of at least ", kHeaderBytes, " bytes, got ", file_bytes);
    void* const memory = mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) fail("--arena-fd: cannot map the file's ", file_bytes, " bytes: ", std::strerror(errno));
    madvise(memory, file_bytes, MADV_DONTDUMP);  // a dump of a failed process would have all states in it
    memory_ = static_cast<std::byte*>(memory);
    mapped_bytes_ = file_bytes;
    try {
        std::memcpy(&header_, memory_, sizeof(header_));
        check_scalars(header_, file_bytes);
        check_regions(header_);
        ranges_.assign(at<Range>(header_.ranges_offset), at<Range>(header_.ranges_offset) + header_.n_ranges);
        blocks_.assign(at<Block>(header_.blocks_offset), at<Block>(header_.blocks_offset) + header_.n_blocks);
        check_tables();
    } catch (...) {
        munmap(memory_, mapped_bytes_);
        throw;
    }
}

Arena::~Arena() { munmap(memory_, mapped_bytes_); }

void Arena::check_tables() const {
    for (size_t i = 0; i < ranges_.size(); ++i) {
        check_order("ranges", i, ranges_, header_.numel);
        require(ranges_[i].param_group < header_.n_param_groups, "arena: ranges[", i,
                "].param_group must be below n_param_groups = ", header_.n_param_groups, ", got ", ranges_[i].param_group);
        require(ranges_[i].n_missed >= 0, "arena: ranges[", i, "].n_missed must be at least 0, got ", ranges_[i].n_missed);
    }
    for (size_t i = 0; i < blocks_.size(); ++i) {
        check_order("blocks", i, blocks_, header_.numel);
        const uint64_t size = blocks_[i].end - blocks_[i].begin;
        require(size <= header_.slot_numel, "arena: blocks[", i, "] must have at most slot_numel = ", header_.slot_numel,
                " elements, got ", size);
    }
    if (moments_dtype() == DataType::kInt8) check_scales();
}

// Of a tile, another range must have no part.
void Arena::check_scales() const {
    uint64_t n_before = 0;
    auto block = blocks_.begin();
    for (size_t i = 0; i < ranges_.size(); ++i) {
        const Range& range = ranges_[i];
        while (block != blocks_.end() && block->end <= range.begin) ++block;
        require(block == blocks_.end() || range.end <= (range.begin < block->begin ? block->begin : block->end), "arena: ranges[",
                i, "] must lie within one block, got [", range.begin, ", ", range.end, ")");
        const uint64_t n = (range.end - range.begin + kTileElements - 1) / kTileElements;
        require(range.first_scale >= n_before && n <= header_.n_scales && range.first_scale <= header_.n_scales - n,
                "arena: ranges[", i, "].first_scale must be from ", n_before, " to ", header_.n_scales, " less its ", n,
                " tiles, got ", range.first_scale);
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

}  // namespace zenflow
