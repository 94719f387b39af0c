#include "arena.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "error.h"

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

    uint64_t bytes() const { return count * entry_bytes; }
    uint64_t end() const { return offset + bytes(); }
};

void check_dtype(const char* field, uint32_t value) {
    if (value > static_cast<uint32_t>(DataType::kFloat16)) {
        fail("arena: ", field, " is ", value, ", allowed are 0 (float32), 1 (bfloat16) and 2 (float16)");
    }
}

void check_scalars(const ArenaHeader& header, uint64_t file_bytes) {
    if (header.magic != kMagic) fail("arena: magic is ", header.magic, ", not ", kMagic, ": this is no ZenFlow arena");
    if (header.version != kVersion) {
        fail("arena: version is ", header.version, ", this worker speaks ", kVersion,
             ": trainer and worker are of different releases");
    }
    if (header.total_bytes < kHeaderBytes || header.total_bytes > file_bytes) {
        fail("arena: total_bytes is ", header.total_bytes, ", allowed are ", kHeaderBytes, " to ", file_bytes,
             ", the size of the file");
    }
    check_dtype("gradient_dtype", header.gradient_dtype);
    check_dtype("weight_dtype", header.weight_dtype);
    // The count of the step before is read while a step's own is written.
    if (header.n_step_records < 2) fail("arena: n_step_records is ", header.n_step_records, ", at least 2 are needed");
    if (header.n_journal_slots == 0) fail("arena: n_journal_slots is 0, at least 1 is needed");
    const uint64_t record_bytes = sizeof(StepRecord) + uint64_t{header.n_param_groups} * sizeof(Hyperparameters);
    const uint64_t rounded_up = (record_bytes + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
    if (header.step_record_bytes != rounded_up) {
        fail("arena: step_record_bytes is ", header.step_record_bytes, ", but n_param_groups = ", header.n_param_groups,
             " needs ", rounded_up);
    }
    if (header.resolved_step < 0) fail("arena: resolved_step is ", header.resolved_step, ", allowed are 0 and above");
}

void check_region(const Region& region, uint64_t total_bytes) {
    if (region.offset < kHeaderBytes || region.offset > total_bytes || region.offset % region.alignment != 0) {
        fail("arena: ", region.offset_name, " is ", region.offset, ", allowed are multiples of ", region.alignment, " from ",
             kHeaderBytes, " to total_bytes = ", total_bytes);
    }
    const uint64_t room = (total_bytes - region.offset) / region.entry_bytes;
    if (region.count > room) {
        fail("arena: ", region.count_name, " is ", region.count, ", but from ", region.offset_name, " = ", region.offset,
             " to total_bytes = ", total_bytes, " there is room for ", room);
    }
}

void check_regions(const ArenaHeader& header) {
    const uint64_t gradient_bytes = element_bytes(static_cast<DataType>(header.gradient_dtype));
    const uint64_t weight_bytes = element_bytes(static_cast<DataType>(header.weight_dtype));
    // Keeps the size of a page below 2^64; no real page comes near it.
    if (header.page_numel > header.total_bytes) {
        fail("arena: page_numel is ", header.page_numel, ", allowed are up to total_bytes = ", header.total_bytes);
    }
    const uint64_t page_numel = std::max<uint64_t>(header.page_numel, 1);
    std::vector<Region> regions = {
        {"ranges_offset", header.ranges_offset, "n_ranges", header.n_ranges, sizeof(Range), alignof(Range)},
        {"blocks_offset", header.blocks_offset, "n_blocks", header.n_blocks, sizeof(Block), alignof(Block)},
        {"step_records_offset", header.step_records_offset, "n_step_records", header.n_step_records, header.step_record_bytes,
         alignof(StepRecord)},
        {"master_offset", header.master_offset, "numel", header.numel, sizeof(float), alignof(float)},
        {"exp_avg_offset", header.exp_avg_offset, "numel", header.numel, sizeof(float), alignof(float)},
        {"exp_avg_sq_offset", header.exp_avg_sq_offset, "numel", header.numel, sizeof(float), alignof(float)},
        {"pages_offset", header.pages_offset, "n_pages", header.n_pages, page_numel * gradient_bytes, gradient_bytes},
        {"publish_offset", header.publish_offset, "n_publish_buffers", header.n_publish_buffers, page_numel * weight_bytes,
         weight_bytes},
        {"journal_offset", header.journal_offset, "n_journal_slots", header.n_journal_slots, sizeof(JournalSlot),
         alignof(JournalSlot)},
        {"block_words_offset", header.block_words_offset, "n_blocks", header.n_blocks, sizeof(StepWord), alignof(StepWord)},
    };
    for (const Region& region : regions) check_region(region, header.total_bytes);

    regions.erase(std::remove_if(regions.begin(), regions.end(), [](const Region& region) { return region.count == 0; }),
                  regions.end());
    std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.offset < b.offset; });
    for (size_t i = 1; i < regions.size(); ++i) {
        if (regions[i].offset < regions[i - 1].end()) {
            fail("arena: ", regions[i].offset_name, " is ", regions[i].offset, ", inside what begins at ",
                 regions[i - 1].offset_name, " = ", regions[i - 1].offset, " and ends at ", regions[i - 1].end());
        }
    }
}

// Checks that an entry begins at or after its predecessor's end and ends at or before the partition's.
template <typename Entry>
void check_order(const char* table, size_t index, const std::vector<Entry>& entries, uint64_t numel) {
    const Entry& entry = entries[index];
    const uint64_t previous_end = index == 0 ? 0 : entries[index - 1].end;
    if (entry.begin < previous_end || entry.begin > entry.end || entry.end > numel) {
        fail("arena: ", table, "[", index, "] is [", entry.begin, ", ", entry.end, "), allowed are ascending bounds from ",
             previous_end, ", the end of the one before it, to numel = ", numel);
    }
}

}  // namespace

size_t element_bytes(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

Arena::Arena(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0) fail("--arena-fd: ", fd, " is no open file: ", std::strerror(errno));
    const auto file_bytes = static_cast<uint64_t>(status.st_size);
    if (file_bytes < kHeaderBytes) {
        fail("--arena-fd: file ", fd, " has ", file_bytes, " bytes, an arena has at least ", kHeaderBytes);
    }
    void* const memory = mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) fail("--arena-fd: cannot map the ", file_bytes, " bytes of file ", fd, ": ", std::strerror(errno));
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
        if (ranges_[i].param_group >= header_.n_param_groups) {
            fail("arena: ranges[", i, "].param_group is ", ranges_[i].param_group,
                 ", allowed are numbers below n_param_groups = ", header_.n_param_groups);
        }
    }
    for (size_t i = 0; i < blocks_.size(); ++i) {
        check_order("blocks", i, blocks_, header_.numel);
        const uint64_t size = blocks_[i].end - blocks_[i].begin;
        if (size > header_.page_numel) {
            fail("arena: blocks[", i, "] has ", size, " elements, allowed are up to page_numel = ", header_.page_numel);
        }
    }
}

const std::byte* Arena::page(uint32_t index) const {
    return memory_ + header_.pages_offset + index * header_.page_numel * element_bytes(gradient_dtype());
}

std::byte* Arena::publish_buffer(uint32_t index) const {
    return memory_ + header_.publish_offset + index * header_.page_numel * element_bytes(weight_dtype());
}

StepRecord& Arena::step_record(int64_t step) const {
    const uint64_t index = static_cast<uint64_t>(step) % header_.n_step_records;
    return *at<StepRecord>(header_.step_records_offset + index * header_.step_record_bytes);
}

const Hyperparameters& Arena::hyperparameters(int64_t step, uint32_t param_group) const {
    return reinterpret_cast<const Hyperparameters*>(&step_record(step) + 1)[param_group];
}

}  // namespace zenflow
