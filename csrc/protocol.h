// The contract between the trainer (Python) and its worker process: shared memory layout and socket messages.
//
// One memfd per rank, the *arena*, is mapped by both processes; the trainer creates it, fills the header and the tables, and
// passes the file descriptor and one end of a SOCK_SEQPACKET socket pair to the worker at exec. Byte offsets count from the
// arena's start, element offsets from the start of the rank's partition. All structures are plain, naturally aligned,
// little-endian and mirrored field by field in lightning_zenflow/protocol.py; `zenflow-worker --layout` prints the sizes and
// offsets that a test compares.
//
// Ownership. Who may write what, and when:
//   header, tables             trainer, before the worker starts; the fields from `resolved_step` on belong to the worker while a
//                              round is in flight
//   step records               trainer, before the first round that names the step; `word` by a device copy that may come later
//   block words                a device copy, before or after the early round that waits for it
//   gradient pages             trainer, until the round that names the page is submitted; free again when its Done arrived
//   master, moments of a block worker, from submission of a round of that block until its Done; the trainer otherwise. Before
//                              Ready and the first round the worker reads them, so that the system takes their memory from the
//                              NUMA nodes of its threads; the trainer should not have touched them before
//   publish buffers            worker, from submission until Done; the trainer until it submits the next round that names it
//   journal                    worker
//
// Death of the worker. It may be killed at any instant: a new one on the same arena carries on once the trainer has submitted
// those rounds again, unchanged and in order, whose Done it has not seen. Rounds up to `completed_round` are answered without
// being done twice. The round between that and `begun_round` is continued where the journal says (tile_journal.h, journal.h);
// every other one has touched nothing. All of this relies on program order alone: a thread that is killed has carried out its
// instructions up to some point and none after it, and the memory outlives the process.
//
// A round's data may still be on its way from the device when the Round message arrives. The worker therefore waits for the
// sequence word of the round's last step before it touches anything: the device copies gradients, then the clip coefficient, then
// the sequence number in stream order, so the word's arrival implies that everything before it has arrived (and that publish
// copies issued before that step have been read).
//
// An *early* round applies one step to a block whose gradient is complete while other blocks' gradients are still being computed.
// It waits for its block's word instead, which the device copies behind the block's gradient, with a factor for that block alone:
// NaN if a gradient so far was not finite. The count of applied steps that it uses is that of the step before, plus one. The step
// itself is resolved later, by its own word, so it counts as applied or not for all that comes after.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zenflow {

constexpr uint64_t kMagic = 0x574f4c464e455a31ull;  // "1ZENFLOW" in memory order
constexpr uint64_t kVersion = 6;
constexpr size_t kHeaderBytes = 4096;
constexpr size_t kMaxMessageBytes = 16384;
constexpr size_t kTileElements = 128;  // that the kernel updates at once
constexpr size_t kJournalSlotBytes = 4096;
constexpr size_t kMaxThreadSpans = 256;  // that a Done message holds

enum class DataType : uint32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct ArenaHeader {
    uint64_t magic;
    uint64_t version;
    uint64_t total_bytes;

    uint32_t gradient_dtype;  // DataType of the gradient pages
    uint32_t weight_dtype;    // DataType of the publish buffers
    uint64_t numel;           // elements of the partition, padding included: length of master, exp_avg, exp_avg_sq

    uint32_t n_ranges;  // entries of the range table
    uint32_t n_blocks;  // entries of the block table
    uint32_t n_param_groups;
    uint32_t n_step_records;  // capacity of the ring of step records; step t lives in record t % n_step_records
    uint32_t n_pages;
    uint32_t n_publish_buffers;
    uint64_t page_numel;       // elements of a page and of a publish buffer: the largest block, rounded up to 4096 bytes
    uint32_t n_journal_slots;  // at least 1; rounds are shared out to no more threads than that
    uint32_t reserved;

    uint64_t ranges_offset;        // Range[n_ranges], ascending, disjoint
    uint64_t blocks_offset;        // Block[n_blocks], ascending, disjoint
    uint64_t step_records_offset;  // n_step_records of them, `step_record_bytes` apart
    uint64_t step_record_bytes;    // sizeof(StepRecord) + n_param_groups * sizeof(Hyperparameters), rounded up to 64
    uint64_t master_offset;        // float[numel]
    uint64_t exp_avg_offset;       // float[numel]
    uint64_t exp_avg_sq_offset;    // float[numel]
    uint64_t pages_offset;         // gradient_dtype[n_pages][page_numel]
    uint64_t publish_offset;       // weight_dtype[n_publish_buffers][page_numel]
    uint64_t journal_offset;       // JournalSlot[n_journal_slots]
    uint64_t block_words_offset;   // StepWord[n_blocks], of early rounds

    // The last step whose word the worker has read; the record's count says how many steps up to it were applied (their clip
    // coefficient was not NaN). The trainer sets both before start and, with no round in flight, after loading a checkpoint.
    // It then also sets every word's sequence to 0, those of blocks too: one left from before would count as a repeated step's.
    int64_t resolved_step;

    // The last round that was begun, and the last that is complete; 0 before the first. They differ while one is in hand.
    int64_t begun_round;
    int64_t completed_round;
    uint64_t n_shares;  // of the round begun last: the journal's first slots
};
static_assert(sizeof(ArenaHeader) <= kHeaderBytes, "the header must fit its page");

// Elements [begin, end) of the partition belong to `param_group`. Alignment padding is in no range and is never touched.
struct Range {
    uint64_t begin;
    uint64_t end;
    uint32_t param_group;
    uint32_t reserved;
};

// Elements [begin, end) of the partition that are handed over together. Element e of the block lies at e - begin in its pages.
struct Block {
    uint64_t begin;
    uint64_t end;
};

// What a step of one parameter group needs besides the gradient; the scheduler may change any of it from step to step.
struct Hyperparameters {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    uint32_t decoupled;  // 1: AdamW (decay acts on the weight), 0: Adam (decay is added to the gradient)
    uint32_t reserved;
};

// Written by the device in stream order, `clip` first, `sequence` second. A step's, or a block's in a step.
struct StepWord {
    float clip;  // factor on the gradient: clip coefficient over loss scale; NaN: the step changes nothing (in the block)
    uint32_t reserved;
    int64_t sequence;  // the step's number once everything of the step (of the block in the step) has arrived
};

// Followed in memory by Hyperparameters[n_param_groups].
struct StepRecord {
    StepWord word;
    int64_t count;  // worker: number of applied steps up to and including this one; valid once resolved_step has reached it
    int64_t reserved;
};

// One thread's share of a round, and how far it is; tile_journal.h says how it is kept.
struct JournalSlot {
    float saved[3 * kTileElements];  // master, exp_avg and exp_avg_sq of one tile before its last update
    uint64_t begin;                  // elements [begin, end) of the partition, in order
    uint64_t end;
    uint64_t position;  // everything before it is done; the tile in hand begins here
    uint64_t saved_at;  // element at which the tile in `saved` begins
    uint8_t reserved[kJournalSlotBytes - 3 * kTileElements * sizeof(float) - 4 * sizeof(uint64_t)];
};
static_assert(sizeof(JournalSlot) == kJournalSlotBytes, "slots are whole pages of memory, so that threads share none");

enum class MessageType : uint32_t {
    kRound = 1,  // trainer -> worker: Round, then uint32_t pages[n_steps]
    kExit = 2,   // trainer -> worker: MessageHeader; the worker finishes what it has and exits with 0
    kReady = 3,  // worker -> trainer: Ready, once, before anything else
    kDone = 4,   // worker -> trainer: Done, then ThreadSpan[n_spans], one message per round, in order of submission
    kError = 5,  // worker -> trainer: MessageHeader, then UTF-8 text without terminator; the worker exits with 1 after it
};

struct MessageHeader {
    uint32_t type;
    uint32_t reserved;
};

enum class Rule : uint32_t {
    kReplay = 0,      // one update for each step's gradient, in order
    kAccumulate = 1,  // one update with the mean of the steps' gradients, by the last step's hyperparameters
};

// Apply steps [first_step, first_step + n_steps) to `block`, gradient of step first_step + i in page pages[i], then write the
// block's new weights to `publish_buffer`, moved on by `look_ahead` further steps along the momentum; master weights stay exact.
// n_steps = 0 only publishes, and only without look-ahead.
struct Round {
    uint32_t type;
    uint32_t block;
    int64_t round_id;  // from 1, ascending
    int64_t first_step;
    uint32_t n_steps;
    uint32_t publish_buffer;
    uint32_t rule;      // Rule
    float look_ahead;   // in steps, finite, >= 0
    int64_t n_updates;  // kAccumulate: updates of the block before this one, for the bias correction
    uint32_t early;     // 1: an early round, of one step, with kReplay; 0: any other
    uint32_t reserved;
};

struct Ready {
    uint32_t type;
    uint32_t n_threads;
    uint64_t version;
};

struct Done {
    uint32_t type;
    uint32_t block;
    int64_t round_id;
    int64_t start_ns;  // when the message was read: CLOCK_MONOTONIC, which the trainer reads as well
    int64_t wait_ns;   // time between reading the message and the arrival of the round's word
    int64_t busy_ns;   // time spent computing after that; this and wait_ns are 0 if the round was complete before
    uint32_t n_spans;  // threads that had a share of the round, at most kMaxThreadSpans; 0 if it was complete before
    uint32_t reserved;
};

// When a thread worked on a round: the first one behind Done is of the thread on the first core of --cores, and so on.
struct ThreadSpan {
    int64_t begin_ns;  // CLOCK_MONOTONIC
    int64_t end_ns;
};
static_assert(sizeof(Done) + kMaxThreadSpans * sizeof(ThreadSpan) <= kMaxMessageBytes, "a Done must fit a message");

}  // namespace zenflow
