#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <limits>
#include <string>

#include "check.h"
#include "trainer_arena.h"
#include "worker/arena.h"

namespace zenflow {
namespace {

using test::ArenaSpec;
using test::error_of;
using test::TrainerArena;

// The error of mapping a valid arena after `change`.
std::string error_after(const std::function<void(TrainerArena&)>& change) {
    TrainerArena trainer;
    change(trainer);
    return error_of([&trainer] { const Arena arena(trainer.fd()); });
}

TEST(arena, both_sides_see_the_same_memory) {
    ArenaSpec spec;
    spec.model_dtype = DataType::kBFloat16;
    TrainerArena trainer(spec);
    const int fd = dup(trainer.fd());
    const Arena arena(fd);
    close(fd);  // which the mapping outlives
    trainer.slot(5)[127] = std::byte{4};
    CHECK(arena.slot(5)[127] == std::byte{4});
    arena.publish_buffer(1)[127] = std::byte{5};
    CHECK(trainer.publish_buffer(1)[127] == std::byte{5});
    trainer.hyperparameters(7, 1).lr = 0.5;
    CHECK_EQ(arena.hyperparameters(7, 1).lr, 0.5);
    CHECK_EQ(&arena.step_record(7), &arena.step_record(3));
    arena.journal_entry(2).position = 11;
    CHECK_EQ(trainer.journal_entry(2).position, 11u);
}

TEST(arena, error_names_the_invalid_header_field) {
    struct Case {
        const char* field;
        std::function<void(ArenaHeader&)> change;
    };
    constexpr uint64_t kHuge64 = std::numeric_limits<uint64_t>::max();
    constexpr uint32_t kHuge32 = std::numeric_limits<uint32_t>::max();
    const Case cases[] = {
        {"magic", [](ArenaHeader& h) { h.magic ^= 1; }},
        {"version", [](ArenaHeader& h) { h.version = kVersion + 1; }},
        {"total_bytes", [](ArenaHeader& h) { h.total_bytes += 1; }},
        {"total_bytes", [](ArenaHeader& h) { h.total_bytes = kHeaderBytes - 1; }},
        {"moments_dtype", [](ArenaHeader& h) { h.moments_dtype = 2; }},
        {"moments_dtype", [](ArenaHeader& h) { h.moments_dtype = 4; }},
        {"gradient_dtype", [](ArenaHeader& h) { h.gradient_dtype = 3; }},
        {"n_scales", [](ArenaHeader& h) { h.n_scales = kHuge64; }},
        {"weight_dtype", [](ArenaHeader& h) { h.weight_dtype = 1; }},
        {"numel", [](ArenaHeader& h) { h.numel = kHuge64; }},
        {"n_ranges", [](ArenaHeader& h) { h.n_ranges = kHuge32; }},
        {"n_blocks", [](ArenaHeader& h) { h.n_blocks = kHuge32; }},
        {"n_param_groups", [](ArenaHeader& h) { h.n_param_groups = kHuge32; }},
        {"n_step_records", [](ArenaHeader& h) { h.n_step_records = 0; }},
        {"n_step_records", [](ArenaHeader& h) { h.n_step_records = kHuge32; }},
        {"n_slots", [](ArenaHeader& h) { h.n_slots = kHuge32; }},
        {"n_publish_buffers", [](ArenaHeader& h) { h.n_publish_buffers = kHuge32; }},
        {"slot_numel", [](ArenaHeader& h) { h.slot_numel = kHuge64; }},
        {"step_record_bytes", [](ArenaHeader& h) { h.step_record_bytes += 64; }},
        {"resolved_step", [](ArenaHeader& h) { h.resolved_step = -1; }},
        {"n_journal_entries", [](ArenaHeader& h) { h.n_journal_entries = 0; }},
        {"n_journal_entries", [](ArenaHeader& h) { h.n_journal_entries = 1000; }},
        {"journal_offset", [](ArenaHeader& h) { h.journal_offset -= 64; }},
    };
    for (const Case& c : cases) {
        CHECK_CONTAINS(error_after([&c](TrainerArena& trainer) { c.change(trainer.header()); }), c.field);
    }
}

TEST(arena, error_names_the_invalid_offset) {
    constexpr uint64_t ArenaHeader::* kOffsets[] = {
        &ArenaHeader::ranges_offset, &ArenaHeader::blocks_offset,  &ArenaHeader::step_records_offset,
        &ArenaHeader::master_offset, &ArenaHeader::exp_avg_offset, &ArenaHeader::exp_avg_sq_offset,
        &ArenaHeader::slots_offset,  &ArenaHeader::publish_offset, &ArenaHeader::block_words_offset,
    };
    for (const auto offset : kOffsets) {
        // Inside the header, misaligned, at the very end, behind it.
        CHECK_CONTAINS(error_after([&](TrainerArena& t) { t.header().*offset = 0; }), "_offset");
        CHECK_CONTAINS(error_after([&](TrainerArena& t) { t.header().*offset += 1; }), "_offset");
        CHECK_CONTAINS(error_after([&](TrainerArena& t) { t.header().*offset = t.header().total_bytes; }), "_offset");
        CHECK_CONTAINS(error_after([&](TrainerArena& t) { t.header().*offset = ~uint64_t{7}; }), "_offset");
    }
    const std::string overlap = error_after([](TrainerArena& t) { t.header().exp_avg_offset = t.header().master_offset + 8; });
    CHECK_CONTAINS(overlap, "exp_avg_offset");
    CHECK_CONTAINS(overlap, "master_offset");
}

TEST(arena, error_names_the_invalid_table_entry) {
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.ranges()[0].end = 49; }), "ranges[1]");
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.ranges()[0].begin = 41; }), "ranges[0]");
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.ranges()[1].end = 101; }), "ranges[1]");
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.ranges()[1].param_group = 2; }), "ranges[1].param_group");
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.blocks()[1].begin = 63; }), "blocks[1]");
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.blocks()[1].end = 101; }), "blocks[1]");
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.blocks()[1] = {100, 99}; }), "blocks[1]");
    CHECK_CONTAINS(error_after([](TrainerArena& t) { t.blocks()[0].end = 65; }), "slot_numel");
    // With scales, tiles are parts of blocks and have scales of their own.
    const auto error_with_scales = [](const std::function<void(TrainerArena&)>& change) {
        return error_after([&change](TrainerArena& t) {
            t.header().moments_dtype = static_cast<uint32_t>(DataType::kInt8);
            t.header().scales_offset = t.header().exp_avg_sq_offset + 128;
            t.header().n_scales = 3;
            t.ranges()[0] = {0, 40, 0, 0};
            t.ranges()[1] = {64, 100, 1, 1};
            change(t);
        });
    };
    CHECK_CONTAINS(error_with_scales([](TrainerArena& t) { t.ranges()[1].begin = 60; }), "ranges[1] must lie within one block");
    CHECK_CONTAINS(error_with_scales([](TrainerArena& t) {
                       t.ranges()[0].end = 64, t.ranges()[0].begin = 20;
                       t.blocks()[0].end = 30;
                   }),
                   "ranges[0] must lie within one block");
    CHECK_CONTAINS(error_with_scales([](TrainerArena& t) { t.ranges()[1].first_scale = 0; }), "ranges[1].first_scale");
    CHECK_CONTAINS(error_with_scales([](TrainerArena& t) { t.ranges()[1].first_scale = 3; }), "ranges[1].first_scale");
}

TEST(arena, error_describes_the_invalid_file) {
    CHECK_CONTAINS(error_of([] { const Arena arena(9999); }), "--arena-fd must be an open file, got 9999");
    const int fd = memfd_create("zenflow-test-short", MFD_CLOEXEC);
    CHECK_CONTAINS(error_of([fd] { const Arena arena(fd); }), "got 0");
    close(fd);
}

}  // namespace
}  // namespace zenflow
