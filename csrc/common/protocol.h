// The contract between the trainer (Python) and its worker process: shared memory layout and socket messages.
//
// Each rank has one memfd, the *arena*, which both processes map. The trainer creates it, fills the header and the tables, and
// passes its file descriptor and one end of a SOCK_SEQPACKET socket pair to the worker at exec. Byte offsets count from the start
// of the arena, element offsets from the start of the rank's partition. All structures are plain, naturally aligned and
// little-endian. lightning_zenflow/native.py mirrors them field by field; a test compares it with this file.
//
// Ownership. A *job* updates one block and publishes its weights.
//
//   header, tables       trainer, before the worker starts; from `resolved_step` on: worker, while a job is in flight
//   step records         trainer, before the first job that names the step, each set of hyperparameters before the first job
//                        that uses it, the committed step's before the copy of `word` too; `word`: one device copy, which may
//                        come later
//   block words          one device copy each, before or after submission of the job that waits for it
//   gradient slots       trainer, until it submits the first job that names the slot, and again after the Done of the job that
//                        commits it (or of the last one that names it, if the gradient is dropped); unchanged in between
//   state of a block     (master, moments) worker, from submission of a job of that block until its Done; otherwise the trainer.
//                        The worker reads them before Ready, so that the kernel allocates their pages on the NUMA nodes of its
//                        threads; the trainer should not touch them earlier
//   publish buffers      worker, from submission until Done; the trainer until it submits the next job that names it. One that
//                        the trainer does not read may be named by several jobs in flight
//   journal              worker
//
// Two parts. A job's *committed* part applies steps to master weights and moments, each with the factor in the step's record. Its
// *tentative* part applies the next step in registers: only the published weights show it. Either part may be empty. So weights
// can be published before the step's factor is known, and a later job commits the same gradient with the true one:
//
//   job of step t        committed            tentative
//   n_committed = 1      t - 1                t                the state is one update behind (S = 1)
//   n_committed = S      t - S ... t - 1      t                a window whose last gradient has just arrived
//   n_committed = 0                           t                after a flush, or to show t once more with the true factor
//   no tentative part    first_step ...                        a flush, or a window that is submitted after its last step
//
// The tentative step's factor is known in backward as a prediction only: it is in the block's word, and the hyperparameters that
// are known then are the record's second set. The true ones are the step's word and the first set, written at the step's end.
// `Tentative` says which are taken. The count of applied steps is that of the step before, plus one.
//
// Nothing that is not finite is published: a step whose factor is not finite is left out. The worker does not look at gradients.
// The trainer has to compute each factor from a sum over them, in stream order and with the block's own, so that a gradient that
// is not finite gives NaN. Left out of the committed part, a step is not counted either; left out of the tentative part, the
// published weights are those of the committed part alone.
//
// Asynchronous data. An UpdateJob message may arrive before its gradients. Before it touches anything, the worker waits for the
// sequence word of the last committed step (with an empty committed part, of the step before the tentative one), and then for the
// word of the tentative part, if there is one: the block's, or with kCorrection the step's. The device copies the gradients and
// then, in one copy of 16 bytes, the word, in stream order, so a word's arrival happens after that of everything before it (and
// after the device has read publish buffers copied before it). A block has one word: the job that waits for it must be done
// before the device writes it again (publish lag 0).
//
// What this assumes of device and bus, since the worker polls the word and calls no function of the device's library:
//
//   Within a word        Nothing. Its bytes may become visible in any order and in parts of 4 bytes: `check` says whether factor
//                        and sequence number belong together. (PCI Express Base Specification, 2.4.3 "Update Ordering and
//                        Granularity Provided by a Write Transaction", recommends that a host CPU sees no smaller parts.)
//   Gradients, word      A copy's bytes become visible to the host no later than those of the next copy on the same stream. CUDA
//                        executes the operations of a stream in order (CUDA C++ Programming Guide, "Streams"), but promises
//                        visibility to a host that waits for an event or a stream only. Of its operations on a stream that are
//                        meant for polling, it says that there is a fence between them and earlier writes (CUDA Driver API,
//                        "Stream Memory Operations", CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER); of copies it says nothing. The
//                        bus keeps the order: a posted write must not pass another one of the same device and traffic class
//                        unless it asks for relaxed ordering (PCI Express Base Specification, 2.4.1 "Transaction Ordering
//                        Rules"). A device that asks for it in copies, or a link that is not PCI Express (NVLink-C2C), has to
//                        be tested: tests/gpu/test_gpu_order.py.
//   Worker               The cores see writes of the device as those of another core (coherent DMA), so that acquiring the
//                        sequence number is enough. Memory that is not page-locked is written by the trainer's core instead.
//
// Messages. Neither end blocks in sending while the other one does: the trainer reads answers where its socket is full, and the
// worker keeps answers that do not fit until the trainer reads.
//
// Order. Jobs of one block are done in the order of their submission, and a request after all jobs before it. Beyond that the
// worker takes the oldest job and waits for its words; or, with `newest_first`, that of the newest whose words have arrived, a
// block's jobs counting as new as its newest one. Layers whose gradients come last in backward are needed first in the next
// forward pass, so the newest job is the most urgent.
//
// Restart. The worker may be killed at any instant. The trainer starts a new one on the same arena and resubmits, unchanged and
// in order, the jobs whose Done it has not received. Jobs are idempotent: those that `block_jobs` has are acknowledged without
// being applied again; `begun_job`, where it is not `completed_job`, comes first and continues from the undo log
// (tile_journal.h, journal.h); all others have not changed anything. Program order suffices for this: a killed thread has
// executed a prefix of its instructions, and the memory outlives the process.
//
// The choice of a tentative step's factor is in `block_shown` before `begun_job` says that the job has begun: who continues the
// job takes it from there, so that all its tiles have one factor, and a job that has not begun may choose anew. Only the block's
// next kCorrection job reads it beyond that, and jobs of one block are done in order. That job never writes it: it compares
// again, with the same result, until it has begun, and then goes on to the end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zenflow {

constexpr uint64_t kMagic = 0x574f4c464e455a31ull;  // "1ZENFLOW" in memory order
constexpr uint64_t kVersion = 19;
constexpr size_t kHeaderBytes = 4096;
constexpr size_t kMaxMessageBytes = 16384;
constexpr size_t kTileElements = 128;  // updated together by the replay kernel
constexpr size_t kJournalEntryBytes = 4096;
constexpr uint32_t kNoBlock = UINT32_MAX;

enum class DataType : uint32_t {
    kFloat32 = 0,
    kBFloat16 = 1,
    kFloat16 = 2,
    kInt8 = 3,  // codes of moments, with MomentScales (adamw/moments_in_8_bits.h)
};

struct ArenaHeader {
    uint64_t magic;
    uint64_t version;
    uint64_t total_bytes;

    uint32_t model_dtype;   // DataType of the gradient slots and the publish buffers
    uint32_t newest_first;  // 0 or 1: which of the jobs that wait comes first, see Order
    uint64_t numel;         // elements of the partition, padding included: length of master, exp_avg, exp_avg_sq

    uint32_t n_ranges;  // entries of the range table
    uint32_t n_blocks;  // entries of the block table
    uint32_t n_param_groups;
    uint32_t n_step_records;  // capacity of the ring of step records; step t lives in record t % n_step_records
    uint32_t n_slots;
    uint32_t n_publish_buffers;
    uint64_t slot_numel;         // elements of a slot and of a publish buffer: the largest block, rounded up to memory pages
    uint32_t n_journal_entries;  // at least 1; upper bound on the threads that share a job
    uint32_t moments_dtype;      // DataType of exp_avg and exp_avg_sq: float32, bfloat16 or int8

    uint64_t ranges_offset;        // Range[n_ranges], ascending, disjoint
    uint64_t blocks_offset;        // Block[n_blocks], ascending, disjoint
    uint64_t step_records_offset;  // n_step_records of them, `step_record_bytes` apart
    uint64_t step_record_bytes;    // sizeof(StepRecord) + 2 * n_param_groups * sizeof(Hyperparameters), rounded up to 64
    uint64_t master_offset;        // float[numel]
    uint64_t exp_avg_offset;       // moments_dtype[numel]
    uint64_t exp_avg_sq_offset;    // moments_dtype[numel]
    uint64_t scales_offset;        // MomentScales[n_scales]
    uint64_t n_scales;             // 0 unless moments_dtype is int8
    uint64_t slots_offset;         // model_dtype[n_slots][slot_numel]
    uint64_t publish_offset;       // model_dtype[n_publish_buffers][slot_numel]
    uint64_t journal_offset;       // JournalEntry[n_journal_entries]
    uint64_t block_words_offset;   // StepWord[n_blocks], of tentative steps
    uint64_t block_jobs_offset;    // int64_t[n_blocks], written by the worker: the last job of the block that is complete, or 0
    uint64_t block_shown_offset;   // BlockShown[n_blocks], written by the worker

    // The last step whose word the worker has read; the record's count says how many steps up to it were applied (their factor
    // was finite). The trainer sets both before start and, with no job in flight, after loading a checkpoint. It then also sets
    // every word, those of blocks included, to 0: a stale one, or its check, would match a repeated step. A step that is repeated
    // because its backward pass was interrupted needs the same for the words of its blocks.
    int64_t resolved_step;

    // The job that was begun last and the one that was completed last, 0 before the first. They differ while one is in progress.
    int64_t begun_job;
    int64_t completed_job;
    uint64_t n_shares;  // of `begun_job`: the journal's first entries

    // While a word is missing, the worker notes one that it waits for, and counts its looks at it, at least one every few
    // milliseconds. The trainer reads this at any time: its limit for the worker does not count the time in which `n_looks`
    // grows, because the word may depend on other ranks, and a worker that hangs does not look. Nothing else depends on these
    // fields.
    int64_t awaited_step;    // 0: all words that it needs have arrived
    uint32_t awaited_block;  // kNoBlock: the step's word
    uint32_t reserved_of_word;
    uint64_t n_looks;
};
static_assert(sizeof(ArenaHeader) <= kHeaderBytes, "the header must fit into its reserved bytes");

// Elements [begin, end) of the partition belong to `param_group`. Alignment padding is in no range and is never touched. Where
// moments have scales, a range lies within one block, and the tile that begins at begin + i * kTileElements has the scales
// first_scale + i. AdamW's count for the range is that of applied steps less `n_missed`, those in which it was frozen.
struct Range {
    uint64_t begin;
    uint64_t end;
    uint32_t param_group;
    uint32_t first_scale;
    int64_t n_missed;  // less than the count of every step that a job names
};

// Of a tile: its largest exp_avg / sqrt(exp_avg_sq), rounded, and its largest exp_avg_sq (moments_in_8_bits.h).
struct MomentScales {
    float exp_avg;
    float exp_avg_sq;
};

// Elements [begin, end) of the partition that one job updates. Element e of the block lies at e - begin in its slots.
struct Block {
    uint64_t begin;
    uint64_t end;
};

// Optimizer settings of one parameter group in one step.
struct Hyperparameters {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    uint32_t decoupled;  // 1: AdamW (decay acts on the weight), 0: Adam (decay is added to the gradient)
    uint32_t reserved;
};

// Written by the device in one copy, in stream order; for a step, or for a block in a step.
struct StepWord {
    float clip;  // factor on the gradient: clip coefficient over loss scale; not finite: the step changes nothing (in the block)
    uint32_t check;    // the bits of `clip`, exclusive or with the low half of `sequence`; otherwise a part has not arrived yet
    int64_t sequence;  // the step's number once everything of the step (of the block in the step) has arrived
};

// Followed in memory by Hyperparameters[2][n_param_groups]: of the committed step, of the tentative one.
struct StepRecord {
    StepWord word;
    int64_t count;  // written by the worker: applied steps up to and including this one; valid once resolved_step reached it
    int64_t reserved;
};

// How the block's last kPredicted or kTrueIfKnown job shows its tentative step.
struct BlockShown {
    int64_t step;  // 0 before the first
    float factor;
    uint32_t is_true;  // 1: `factor` is the step's, with the record's first set; 0: the block's, with the second set
};

// Progress and undo log of one thread's share of a job, see tile_journal.h.
struct JournalEntry {
    float saved[3 * kTileElements];  // master, exp_avg and exp_avg_sq of one tile before its last pass
    uint64_t begin;                  // elements [begin, end) of the partition, in order
    uint64_t end;
    uint64_t position;  // elements before it are done; the current tile begins here
    uint64_t saved_at;  // element at which the tile in `saved` begins
    uint8_t reserved[kJournalEntryBytes - 3 * kTileElements * sizeof(float) - 4 * sizeof(uint64_t)];
};
static_assert(sizeof(JournalEntry) == kJournalEntryBytes, "entries are whole memory pages, so that threads share none");

enum class MessageType : uint32_t {
    kJob = 1,    // trainer -> worker: UpdateJob, then uint32_t slots[n_steps_of(job)]
    kExit = 2,   // trainer -> worker: MessageHeader; the worker completes submitted jobs and exits with status 0
    kReady = 3,  // worker -> trainer: Ready, once, before any other message
    kDone = 4,   // worker -> trainer: Done; one per job, in the order in which they are done
    kError = 5,  // worker -> trainer: MessageHeader, then UTF-8 text without terminator; the worker then exits with status 1
    kTouch = 7,  // trainer -> worker: Touch
    kAcknowledged = 8,  // worker -> trainer: Acknowledged; one per Touch, behind the Done messages of all jobs before
};

struct MessageHeader {
    uint32_t type;
    uint32_t reserved;
};

// A job's tentative part, and where its factor and hyperparameters are from.
enum class Tentative : uint32_t {
    kNone = 0,
    // The block's word and the record's second set: weights for the next forward pass, in backward.
    kPredicted = 1,
    // The step's word and the first set if that word has arrived when the job begins, otherwise as kPredicted; the block's word
    // is waited for in either case. For jobs that the worker may begin after the end of backward.
    kTrueIfKnown = 2,
    // The step's word, which it waits for, and the first set; n_committed = 0. For the forward pass that has to see the true
    // step: the job repeats the block's job before, with the same gradient, in place buffer and prediction_steps too, and is done
    // at once if `block_shown` says that the weights are the same already. The step is then resolved; a later job commits it as
    // any other.
    kCorrection = 3,
};

// Applies steps [first_step, first_step + n_committed) to `block` and, with a tentative part, the step after those to the
// published weights alone. The gradient of step first_step + i is in slots[i]. Writes the block's new weights to
// `publish_buffer`, moved on by `prediction_steps` along the momentum of the last step that is not left out; if there is none,
// the master weights as they are.
struct UpdateJob {
    uint32_t type;
    uint32_t block;
    int64_t job_id;  // from 1, ascending
    int64_t first_step;
    uint32_t n_committed;
    uint32_t publish_buffer;
    float prediction_steps;  // 0 to 1e6
    Tentative tentative;
};

constexpr uint64_t n_steps_of(const UpdateJob& job) {
    return uint64_t{job.n_committed} + (job.tentative != Tentative::kNone ? 1 : 0);
}

struct Ready {
    uint32_t type;
    uint32_t n_threads;
    uint64_t version;
};

struct Done {
    uint32_t type;
    uint32_t block;
    int64_t job_id;
    int64_t busy_ns;  // computation; 0 if the job was complete before
};

// Makes the kernel allocate memory of the arena, [offset, offset + n_rows * row_bytes), on the NUMA nodes of the worker's
// threads, each row in equal parts. Changes no values.
struct Touch {
    uint32_t type;
    uint32_t reserved;
    int64_t request_id;
    uint64_t offset;  // in bytes from the start of the arena
    uint64_t n_rows;
    uint64_t row_bytes;
};

struct Acknowledged {
    uint32_t type;
    uint32_t reserved;
    int64_t request_id;
    int64_t busy_ns;  // computation
};

}  // namespace zenflow
