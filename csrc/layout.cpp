#include "layout.h"

#include <cstddef>

#include "protocol.h"

namespace zenflow {

#define SIZE(type) out << "sizeof(" #type ") " << sizeof(type) << '\n'
#define FIELD(type, field) out << #type "." #field " " << offsetof(type, field) << '\n'

void print_layout(std::ostream& out) {
    out << "kMagic " << kMagic << '\n';
    out << "kVersion " << kVersion << '\n';
    out << "kHeaderBytes " << kHeaderBytes << '\n';
    out << "kMaxMessageBytes " << kMaxMessageBytes << '\n';
    out << "kTileElements " << kTileElements << '\n';
    out << "kJournalSlotBytes " << kJournalSlotBytes << '\n';
    out << "kMaxThreadSpans " << kMaxThreadSpans << '\n';

    SIZE(ArenaHeader);
    FIELD(ArenaHeader, magic);
    FIELD(ArenaHeader, version);
    FIELD(ArenaHeader, total_bytes);
    FIELD(ArenaHeader, gradient_dtype);
    FIELD(ArenaHeader, weight_dtype);
    FIELD(ArenaHeader, numel);
    FIELD(ArenaHeader, n_ranges);
    FIELD(ArenaHeader, n_blocks);
    FIELD(ArenaHeader, n_param_groups);
    FIELD(ArenaHeader, n_step_records);
    FIELD(ArenaHeader, n_pages);
    FIELD(ArenaHeader, n_publish_buffers);
    FIELD(ArenaHeader, page_numel);
    FIELD(ArenaHeader, n_journal_slots);
    FIELD(ArenaHeader, reserved);
    FIELD(ArenaHeader, ranges_offset);
    FIELD(ArenaHeader, blocks_offset);
    FIELD(ArenaHeader, step_records_offset);
    FIELD(ArenaHeader, step_record_bytes);
    FIELD(ArenaHeader, master_offset);
    FIELD(ArenaHeader, exp_avg_offset);
    FIELD(ArenaHeader, exp_avg_sq_offset);
    FIELD(ArenaHeader, pages_offset);
    FIELD(ArenaHeader, publish_offset);
    FIELD(ArenaHeader, journal_offset);
    FIELD(ArenaHeader, block_words_offset);
    FIELD(ArenaHeader, resolved_step);
    FIELD(ArenaHeader, begun_round);
    FIELD(ArenaHeader, completed_round);
    FIELD(ArenaHeader, n_shares);

    SIZE(Range);
    FIELD(Range, begin);
    FIELD(Range, end);
    FIELD(Range, param_group);
    FIELD(Range, reserved);

    SIZE(Block);
    FIELD(Block, begin);
    FIELD(Block, end);

    SIZE(Hyperparameters);
    FIELD(Hyperparameters, lr);
    FIELD(Hyperparameters, beta1);
    FIELD(Hyperparameters, beta2);
    FIELD(Hyperparameters, eps);
    FIELD(Hyperparameters, weight_decay);
    FIELD(Hyperparameters, decoupled);
    FIELD(Hyperparameters, reserved);

    SIZE(StepWord);
    FIELD(StepWord, clip);
    FIELD(StepWord, reserved);
    FIELD(StepWord, sequence);

    SIZE(StepRecord);
    FIELD(StepRecord, word);
    FIELD(StepRecord, count);
    FIELD(StepRecord, reserved);

    SIZE(JournalSlot);
    FIELD(JournalSlot, saved);
    FIELD(JournalSlot, begin);
    FIELD(JournalSlot, end);
    FIELD(JournalSlot, position);
    FIELD(JournalSlot, saved_at);
    FIELD(JournalSlot, reserved);

    SIZE(MessageHeader);
    FIELD(MessageHeader, type);
    FIELD(MessageHeader, reserved);

    SIZE(Round);
    FIELD(Round, type);
    FIELD(Round, block);
    FIELD(Round, round_id);
    FIELD(Round, first_step);
    FIELD(Round, n_steps);
    FIELD(Round, publish_buffer);
    FIELD(Round, rule);
    FIELD(Round, look_ahead);
    FIELD(Round, n_updates);
    FIELD(Round, early);
    FIELD(Round, reserved);

    SIZE(Ready);
    FIELD(Ready, type);
    FIELD(Ready, n_threads);
    FIELD(Ready, version);

    SIZE(Done);
    FIELD(Done, type);
    FIELD(Done, block);
    FIELD(Done, round_id);
    FIELD(Done, start_ns);
    FIELD(Done, wait_ns);
    FIELD(Done, busy_ns);
    FIELD(Done, n_spans);
    FIELD(Done, reserved);

    SIZE(ThreadSpan);
    FIELD(ThreadSpan, begin_ns);
    FIELD(ThreadSpan, end_ns);
}

}  // namespace zenflow
