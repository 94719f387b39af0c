#include <cstddef>
#include <cstdint>
#include <ostream>

#include "common/protocol.h"
#include "worker/tools.h"

namespace zenflow {
namespace {

struct Line {
    const char* name;
    uint64_t value;
};

#define CONSTANT(name) {#name, name}
#define SIZE(type) {"sizeof(" #type ")", sizeof(type)}
#define FIELD(type, field) {#type "." #field, offsetof(type, field)}

// clang-format off
constexpr Line kLines[] = {
    CONSTANT(kMagic), CONSTANT(kVersion), CONSTANT(kHeaderBytes), CONSTANT(kMaxMessageBytes), CONSTANT(kTileElements),
    CONSTANT(kJournalEntryBytes), CONSTANT(kNoBlock),

    SIZE(ArenaHeader), FIELD(ArenaHeader, magic), FIELD(ArenaHeader, version), FIELD(ArenaHeader, total_bytes),
    FIELD(ArenaHeader, gradient_dtype), FIELD(ArenaHeader, weight_dtype), FIELD(ArenaHeader, numel),
    FIELD(ArenaHeader, n_ranges), FIELD(ArenaHeader, n_blocks), FIELD(ArenaHeader, n_param_groups),
    FIELD(ArenaHeader, n_step_records), FIELD(ArenaHeader, n_slots), FIELD(ArenaHeader, n_publish_buffers),
    FIELD(ArenaHeader, slot_numel), FIELD(ArenaHeader, n_journal_entries), FIELD(ArenaHeader, moments_dtype),
    FIELD(ArenaHeader, newest_first), FIELD(ArenaHeader, reserved),
    FIELD(ArenaHeader, ranges_offset), FIELD(ArenaHeader, blocks_offset), FIELD(ArenaHeader, step_records_offset),
    FIELD(ArenaHeader, step_record_bytes), FIELD(ArenaHeader, master_offset), FIELD(ArenaHeader, exp_avg_offset),
    FIELD(ArenaHeader, exp_avg_sq_offset), FIELD(ArenaHeader, scales_offset), FIELD(ArenaHeader, n_scales),
    FIELD(ArenaHeader, slots_offset), FIELD(ArenaHeader, publish_offset),
    FIELD(ArenaHeader, journal_offset), FIELD(ArenaHeader, block_words_offset), FIELD(ArenaHeader, block_jobs_offset),
    FIELD(ArenaHeader, block_shown_offset), FIELD(ArenaHeader, resolved_step),
    FIELD(ArenaHeader, begun_job), FIELD(ArenaHeader, completed_job), FIELD(ArenaHeader, n_shares),
    FIELD(ArenaHeader, export_offset), FIELD(ArenaHeader, export_bytes), FIELD(ArenaHeader, awaited_step),
    FIELD(ArenaHeader, awaited_block), FIELD(ArenaHeader, reserved_of_word), FIELD(ArenaHeader, n_looks),

    SIZE(Range), FIELD(Range, begin), FIELD(Range, end), FIELD(Range, param_group), FIELD(Range, first_scale),
    SIZE(Block), FIELD(Block, begin), FIELD(Block, end),
    SIZE(MomentScales), FIELD(MomentScales, exp_avg), FIELD(MomentScales, exp_avg_sq),

    SIZE(Hyperparameters), FIELD(Hyperparameters, lr), FIELD(Hyperparameters, beta1), FIELD(Hyperparameters, beta2),
    FIELD(Hyperparameters, eps), FIELD(Hyperparameters, weight_decay), FIELD(Hyperparameters, decoupled),
    FIELD(Hyperparameters, reserved),

    SIZE(StepWord), FIELD(StepWord, clip), FIELD(StepWord, check), FIELD(StepWord, sequence),
    SIZE(StepRecord), FIELD(StepRecord, word), FIELD(StepRecord, count), FIELD(StepRecord, reserved),

    SIZE(BlockShown), FIELD(BlockShown, step), FIELD(BlockShown, factor), FIELD(BlockShown, is_true),

    SIZE(JournalEntry), FIELD(JournalEntry, saved), FIELD(JournalEntry, begin), FIELD(JournalEntry, end),
    FIELD(JournalEntry, position), FIELD(JournalEntry, saved_at), FIELD(JournalEntry, reserved),

    SIZE(MessageHeader), FIELD(MessageHeader, type), FIELD(MessageHeader, reserved),

    SIZE(UpdateJob), FIELD(UpdateJob, type), FIELD(UpdateJob, block), FIELD(UpdateJob, job_id), FIELD(UpdateJob, first_step),
    FIELD(UpdateJob, n_committed), FIELD(UpdateJob, publish_buffer), FIELD(UpdateJob, prediction_steps),
    FIELD(UpdateJob, tentative),

    SIZE(Ready), FIELD(Ready, type), FIELD(Ready, n_threads), FIELD(Ready, version),

    SIZE(Done), FIELD(Done, type), FIELD(Done, block), FIELD(Done, job_id), FIELD(Done, start_ns), FIELD(Done, wait_ns),
    FIELD(Done, busy_ns),

    SIZE(Export), FIELD(Export, type), FIELD(Export, n_tiles), FIELD(Export, request_id), FIELD(Export, tiles_offset),

    SIZE(ExportTile), FIELD(ExportTile, begin), FIELD(ExportTile, rows), FIELD(ExportTile, width), FIELD(ExportTile, n_columns),
    FIELD(ExportTile, columns_offset), FIELD(ExportTile, target_offset), FIELD(ExportTile, target_stride),
    FIELD(ExportTile, first_scale),

    SIZE(Touch), FIELD(Touch, type), FIELD(Touch, reserved), FIELD(Touch, request_id), FIELD(Touch, offset),
    FIELD(Touch, n_rows), FIELD(Touch, row_bytes),

    SIZE(Acknowledged), FIELD(Acknowledged, type), FIELD(Acknowledged, reserved), FIELD(Acknowledged, request_id),
    FIELD(Acknowledged, busy_ns),
};
// clang-format on

}  // namespace

void print_layout(std::ostream& out) {
    for (const Line& line : kLines) out << line.name << ' ' << line.value << '\n';
}

}  // namespace zenflow
