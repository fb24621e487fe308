/*
 * instep: fused optimizer steps over whole gradient buckets, overlapped with backward. docs/c.md has the examples.
 *
 * Written by cbindgen from capi/src; `UPDATE=1 cargo test -p instep-capi header` writes it again.
 *
 * Status: every function that can fail returns a status. Results go to the places at the end of the arguments, and only if
 * the call succeeds.
 *
 * Handles: instep_layout, instep_bucket_step, instep_norm and instep_stepper. A handle is no address. The library refuses a
 * handle that is null, freed or of another kind. Two threads may not use one handle at the same time: the second one gets
 * INSTEP_BUSY. All other calls may run at the same time.
 *
 * Structs: a struct that begins with `size` may grow in later versions. Set `size` to sizeof the struct and all other fields
 * to zeros, which stand for defaults. A library accepts structs of older programs, and structs of newer programs if they use
 * nothing new. The caller owns a struct and the memory at its pointers, and the library reads both only during the call,
 * unless the struct says otherwise.
 *
 * Processes: after the first handle, a forked child gets INSTEP_FORKED from every call that can fail. dlclose leaves the
 * library in memory, because its threads may still run.
 */

#ifndef INSTEP_H
#define INSTEP_H

#include <stddef.h>
#include <stdint.h>

// A kind of instep_scalar: a real number.
#define INSTEP_NUMBER 0

// A kind of instep_scalar: a whole number, such as an epoch or a seed.
#define INSTEP_INTEGER 1

// The kind of an instep_scalar after a load, if the checkpoint has no number of its name.
#define INSTEP_ABSENT 2

// Element type: float, IEEE 754 binary32. In a field for an element type, 0 means the default that the field's comment
// names.
#define INSTEP_F32 1

// Element type: bfloat16.
#define INSTEP_BF16 2

// Element type: IEEE 754 binary16.
#define INSTEP_F16 3

// 16-bit parameters have no master weight. The default.
#define INSTEP_MASTER_NONE 0

// Each 16-bit parameter has a separate f32 weight.
#define INSTEP_MASTER_F32 1

// The bf16 parameter is the upper 16 bits of an f32 weight. A remainder stores the lower 16 bits of the weight.
#define INSTEP_MASTER_REMAINDER16 2

// The bf16 parameter is the upper 16 bits of an f32 weight. A remainder stores the next 8 bits of the weight.
#define INSTEP_MASTER_REMAINDER8 3

// A group is clipped together with all groups that have this value, by the stepper's clip. The default.
#define INSTEP_GROUP_CLIP_TOGETHER 0

// A group is clipped alone, by the exact norm of its own gradients. Refused in INSTEP_MODE_EAGER.
#define INSTEP_GROUP_CLIP_ALONE 1

// A group is not clipped. Refused in INSTEP_MODE_EAGER.
#define INSTEP_GROUP_CLIP_NONE 2

// Optimizer states are f32. The default.
#define INSTEP_STATES_F32 0

// Optimizer states are bf16.
#define INSTEP_STATES_BF16 1

// Optimizer states are 8-bit codes, with an f32 scale per 256 elements.
#define INSTEP_STATES_8BIT 2

// Steps a bucket as soon as it is reduced. The default.
#define INSTEP_MODE_EAGER 0

// Steps all buckets after the last bucket is reduced and the norm is known.
#define INSTEP_MODE_NORMED 1

// Steps all buckets after the last sum, one bucket after the other.
#define INSTEP_MODE_SEQUENTIAL 2

// Stepped gradients stay as they are: sums over the ranks. The default.
#define INSTEP_GRADIENTS_KEEP 0

// The step zeroes the gradients that it has read.
#define INSTEP_GRADIENTS_ZERO 1

// The memory of stepped gradients is returned to the system. Only for a stepper on the CPU that owns its memory.
#define INSTEP_GRADIENTS_RELEASE 2

// The step overwrites each gradient with the value that it used: the mean over ranks, divided by the loss scale and
// clipped.
#define INSTEP_GRADIENTS_AVERAGE 3

// INSTEP_UNUSED_SKIP if the stepper owns its buckets and sums them, otherwise INSTEP_UNUSED_REFUSE.
#define INSTEP_UNUSED_DEFAULT 0

// A parameter is not stepped if no rank wrote its gradient. Refused if the buckets are in the caller's memory, because
// such buckets have no room for the number of ranks that used each parameter.
#define INSTEP_UNUSED_SKIP 1

// If no rank wrote a parameter's gradient, zeros are written to the gradient's memory and the parameter is stepped
// with them.
#define INSTEP_UNUSED_STEP_ZERO 2

// If a gradient was not written, instep_stepper_finish returns an error that names the parameter, and the pass stays
// open.
#define INSTEP_UNUSED_REFUSE 3

// All ranks have the same number of batches. The default.
#define INSTEP_INPUTS_EVEN 0

// Ranks may run out of data, and then call instep_stepper_join. Summed gradients are divided by world_size.
#define INSTEP_INPUTS_BY_WORLD_SIZE 1

// Ranks may run out of data, and then call instep_stepper_join. Summed gradients are divided by the number of ranks
// that had data in the pass.
#define INSTEP_INPUTS_BY_CONTRIBUTORS 2

// The optimizer steps the parameter. The default.
#define INSTEP_ACTION_STEP 0

// The library only averages the parameter's gradient over the ranks, for another optimizer.
#define INSTEP_ACTION_AVERAGE 1

// The library changes neither the parameter nor its summed gradient.
#define INSTEP_ACTION_LEAVE 2

// Nothing is clipped. The default.
#define INSTEP_CLIP_NONE 0

// Clips by the exact norm of all gradients. Refused in INSTEP_MODE_EAGER.
#define INSTEP_CLIP_GLOBAL 1

// Clips by the norm of the previous pass.
#define INSTEP_CLIP_PREVIOUS 2

// Clips each bucket by that bucket's norm.
#define INSTEP_CLIP_PER_BUCKET 3

// The parameter itself. If it has a master weight, instep_stepper_read copies the master's values.
#define INSTEP_PARAM 0

// A parameter's gradient. After a pass it is the sum over the ranks, still multiplied by the loss scale.
#define INSTEP_GRAD 1

// A state of the parameter's optimizer. The state's name must be given.
#define INSTEP_STATE 2

// The parameter's copy in another type.
#define INSTEP_COPY 3

// The parameter's moving average.
#define INSTEP_EMA 4

// The address is for reading.
#define INSTEP_READ 0

// The address is for writing and reading.
#define INSTEP_WRITE 1

// A collective call: every rank gets the sum over all ranks, with the same bits on each.
#define INSTEP_ALL_REDUCE 0

// A collective call: every rank gets rank 0's data.
#define INSTEP_BROADCAST 1

// The largest number of states that an optimizer has per element.
#define INSTEP_STATES_AT_MOST 4

// The step of one bucket, with its step counts and hyperparameters. It has no tensors: they are passed with each call.
//
// The caller owns it until instep_bucket_step_free. Any thread may use it, but only one at a time: a second thread
// gets INSTEP_BUSY. Different bucket steps may be used at the same time.
typedef struct instep_bucket_step instep_bucket_step;

// The names, shapes and groups of a model's parameters.
//
// The caller owns it until instep_layout_free. Bucket steps and steppers copy what they need, so the layout may be
// freed once they are created. Any thread may use it, but only one at a time: a second thread gets INSTEP_BUSY.
typedef struct instep_layout instep_layout;

// The norm over the gradients of any number of buckets. From it follows whether the steps of these buckets are clipped
// or skipped.
//
// The caller owns it until instep_norm_free. Any thread may use it, but only one at a time: a second thread gets
// INSTEP_BUSY.
typedef struct instep_norm instep_norm;

// The training of one rank: its parameters, gradients and states, and the passes that step the parameters.
//
// The caller owns it until instep_stepper_free. Any thread may use it, but only one at a time: a second thread gets
// INSTEP_BUSY. If compute_stream is the per-thread default stream (the value 2), only the thread that created the
// stepper may use the stepper.
typedef struct instep_stepper instep_stepper;

// The outcome of a call. INSTEP_OK is 0. Any other value is a failure, which instep_last_error describes. Codes keep
// their numbers in later versions, which may add codes.
typedef int32_t instep_status;

// Names a tensor of a stepper.
typedef struct {
  // INSTEP_PARAM, INSTEP_GRAD, INSTEP_STATE, INSTEP_COPY or INSTEP_EMA.
  uint32_t kind;
  // The parameter's number.
  uint32_t param;
  // The state's name, from instep_optimizer_state_name. Null for any other kind.
  const char *state;
} instep_tensor_id;

// A flat bucket of gradients in the caller's memory.
typedef struct {
  // The first element.
  void *address;
  // The number of elements, gaps included.
  size_t elements;
  // The numbers of the parameters that have their gradients in this bucket.
  const uint32_t *params;
  // The offset of each gradient in the bucket, in elements.
  const size_t *offsets;
  // The number of parameters in `params`.
  size_t param_count;
} instep_bucket;

// The caller's tensors. They are in the memory of the stepper's device. Their element types follow from the layout and
// the precisions. All gradients of a bucket must have one type.
//
// The stepper reads and writes the tensors until instep_stepper_free has returned. The caller may write a gradient
// from a call of instep_stepper_address with INSTEP_WRITE until the parameter's hand-over. The caller may read a
// parameter from a call of instep_stepper_address until its hand-over. At all other times the caller must not touch
// gradients or parameters.
typedef struct {
  // sizeof(instep_memory).
  size_t size;
  // The address of each parameter, by its number.
  void *const *params;
  // The number of parameters of the layout. In instep_stepper_rebind, 0 means that no parameter has moved.
  size_t param_count;
  // All buckets. They are numbered in the order of this list. Every parameter must be in one bucket.
  const instep_bucket *buckets;
  // The number of buckets. In instep_stepper_rebind, 0 means that the buckets have not changed.
  size_t bucket_count;
} instep_memory;

// One hyperparameter.
typedef struct {
  // Its name in torch.optim, such as "lr" or "weight_decay". A pair such as betas is two hyperparameters with two
  // names, "beta1" and "beta2".
  const char *name;
  // Its value. Flags are 0 or 1.
  double value;
} instep_hyper;

// An optimizer and its hyperparameters. The library reads this struct, its list and its texts only until the call
// returns, and never frees them.
typedef struct {
  // sizeof(instep_optimizer).
  size_t size;
  // Its name in torch.optim or in its paper, in upper or lower case, such as "AdamW", "sgd" or "lamb".
  const char *name;
  // The given hyperparameters. All others have their defaults.
  const instep_hyper *hypers;
  // The number of hyperparameters in `hypers`.
  size_t hyper_count;
} instep_optimizer;

// Element types of the tensors. Arithmetic is f32 for all of them.
typedef struct {
  // sizeof(instep_precision).
  size_t size;
  // Type of parameters. 0: INSTEP_F32.
  uint32_t param;
  // Type in which gradients are stored and summed. 0: INSTEP_F32.
  uint32_t grad;
  // How the low bits of 16-bit parameters are stored: INSTEP_MASTER_NONE, _F32, _REMAINDER16 or _REMAINDER8.
  uint32_t master;
  // Storage of optimizer states: INSTEP_STATES_F32, _BF16 or _8BIT.
  uint32_t states;
  // 1: values that are stored in fewer bits than f32 are rounded stochastically. 0: they are rounded to nearest.
  uint32_t is_stochastic;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // Seed of stochastic rounding, equal on all ranks.
  uint64_t seed;
} instep_precision;

// The optimizer and the precision of one group of parameters.
typedef struct {
  // The group's name.
  const char *name;
  // Its optimizer. Null: the default optimizer of the options.
  const instep_optimizer *optimizer;
  // Its element types. Null: the default precision of the options. It must be null for a bucket step, because a
  // bucket step has only one precision.
  const instep_precision *precision;
  // INSTEP_GROUP_CLIP_TOGETHER, _ALONE or _NONE. It must be 0 for a bucket step, which an instep_norm clips instead.
  uint32_t clip;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // The largest norm of a group that is clipped alone. Otherwise 0.
  double max_norm;
} instep_group;

// A GPU and its options.
typedef struct {
  // sizeof(instep_cuda).
  size_t size;
  // The number of the CUDA device.
  uint32_t ordinal;
  // CUDA priority of the stream on which a stepper's steps run. A lower number is a higher priority.
  int32_t optim_priority;
  // The stream (cudaStream_t or CUstream) of the caller's own work on a stepper's tensors, such as forward and
  // backward. Null: the legacy default stream. Bucket steps and norms take a stream in each call, and ignore this
  // stream.
  void *compute_stream;
  // Largest number of thread blocks of a step. 0: the library chooses. A step is divided into tiles of elements. If
  // tiles move at least 38 KiB on average, a block then steps one tile. If they move less, a block steps so many
  // tiles that it moves about 224 KiB.
  uint32_t max_blocks;
  // Zero. Anything else is refused.
  uint32_t reserved;
} instep_cuda;

// Options of a bucket step. Zeros mean defaults, except in layout and optimizer. The library reads these options, and
// the structs, lists and texts in them, only until the call returns, and never frees them.
typedef struct {
  // sizeof(instep_bucket_step_options).
  size_t size;
  // The model's parameters.
  instep_layout *layout;
  // The optimizer of all groups that `groups` does not name.
  const instep_optimizer *optimizer;
  // Groups with their own optimizers.
  const instep_group *groups;
  // The number of groups.
  size_t group_count;
  // The parameters of the bucket. Null: all parameters of the layout in order, without gaps.
  const uint32_t *params;
  // The offset in the bucket of each parameter in `params`, in elements.
  const size_t *offsets;
  // The number of parameters in `params`.
  size_t param_count;
  // The number of elements of the bucket, gaps included. Without `params` this number is ignored.
  size_t elements;
  // Element types. Null: f32.
  const instep_precision *precision;
  // Element type of copies. A step then writes a copy of each parameter that it steps. 0: there are no copies.
  uint32_t copy;
  // INSTEP_GRADIENTS_KEEP, _ZERO or _AVERAGE.
  uint32_t gradients;
  // Decay rate of the parameters' moving averages. 0: there are no averages.
  double ema_decay;
  // Number of threads of a step on the CPU, including the caller's, at most 1024. 0: only the caller's. Bucket steps
  // with the same number of threads use the same threads. These threads live as long as the process.
  uint32_t threads;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // The GPU. Null: the CPU.
  const instep_cuda *cuda;
  // One number for each parameter in `params`. 0: the parameter is full. Otherwise the parameter is a shard that
  // consists of rows of a full parameter, and the number is the length of a row in elements. Null: all parameters
  // are full. The elements of a shard have the same stochastic rounding, and the same blocks of 8-bit states, as in
  // the full parameter. With 8-bit states, each row of states, scales, masters, copies and averages starts at a
  // multiple of 256 elements.
  const uint64_t *row_elements;
  // One number for each parameter in `params`. For a shard it is the index of the shard's first element. The index
  // counts the elements of all full parameters of the model, one parameter after the other. For a full parameter the
  // number is ignored. Without `row_elements` the list is ignored.
  const uint64_t *first_elements;
} instep_bucket_step_options;

// The memory of one kind of tensor in a bucket, such as its gradients. This is one range of memory with the bucket's
// offsets, or one range for each parameter. If all fields are zero, there is no tensor of this kind.
typedef struct {
  // The first element of the range. Null if each parameter has its own range.
  void *address;
  // For each parameter, the first element of its range, in the order of the bucket. Null if there is one range. On a
  // GPU, only parameters and gradients may have a range per parameter. If a gradient's address is null, its
  // parameter has no gradient in this call. The parameter's tensors and step count then do not change, and norms
  // leave the parameter out.
  void *const *addresses;
  // The number of elements of the range, or the length of `addresses`. The library compares it with the bucket's
  // number of elements or of parameters.
  size_t count;
} instep_tensor;

// The tensors of one step.
//
// The caller owns the memory. Until the call returns, only the step may touch the memory. On a GPU this holds until
// the step on the stream has ended. Addresses must be aligned to an element, and no two tensors may overlap.
typedef struct {
  // sizeof(instep_tensors).
  size_t size;
  // Parameters, in the type that the precision gives.
  instep_tensor params;
  // Summed gradients, in the type that the precision gives.
  instep_tensor grads;
  // Master weights or remainders, if the precision has them. Before the first step an f32 master holds its
  // parameter's value, and remainders are zeros.
  instep_tensor master;
  // Copies of the parameters in another type, if the options ask for copies. The step only writes them.
  instep_tensor copy;
  // Moving averages in f32, if the options ask for them.
  instep_tensor ema;
  // The optimizer's states, in the order of instep_optimizer_state_name. Before the first step they are zeros.
  instep_tensor states[INSTEP_STATES_AT_MOST];
  // The scales of 8-bit states: one float per 256 elements of the bucket.
  instep_tensor scales[INSTEP_STATES_AT_MOST];
} instep_tensors;

// The factors that the gradients contain, and a clip coefficient. The step multiplies each gradient by clip /
// (world_size * loss_scale). A field that is 0 counts as 1.
typedef struct {
  // sizeof(instep_scaling).
  size_t size;
  // The number of ranks over which the gradients were summed.
  uint32_t world_size;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // The factor by which the loss was multiplied.
  double loss_scale;
  // A clip coefficient that the caller has computed, from 0 to 1.
  double clip;
  // Null, or the loss scale in the memory of the step's device. It replaces loss_scale (GradScaler's _scale). It is
  // read when the step runs.
  const float *grad_scale;
  // Null, or a flag in the memory of the step's device. If it is not 0, the step changes nothing (GradScaler's
  // found_inf).
  const float *found_inf;
} instep_scaling;

// A named number of the caller, such as the epoch. A checkpoint stores it beside the stepper's values.
typedef struct {
  // The number's name, such as "epoch". Names that begin with "param.", "state." or "ema." are reserved.
  const char *name;
  // INSTEP_NUMBER or INSTEP_INTEGER. If the file does not have the number, a load sets INSTEP_ABSENT.
  uint32_t kind;
  // Zero.
  uint32_t reserved;
  // The value of an INSTEP_NUMBER.
  double number;
  // The value of an INSTEP_INTEGER.
  uint64_t integer;
} instep_scalar;

// One parameter.
typedef struct {
  // sizeof(instep_param).
  size_t size;
  // The parameter's name. Checkpoints use it too. No other parameter may have this name.
  const char *name;
  // The lengths of the parameter's dimensions. Their product is the number of elements. A parameter without
  // dimensions is a scalar and has one element.
  const size_t *shape;
  // The number of dimensions.
  size_t dimensions;
  // The parameter's group. The group's optimizer steps the parameter. Null: "default".
  const char *group;
  // How often the parameter is handed over in a pass. 0 and 1 mean once. A parameter that several modules share is
  // handed over once for each use.
  uint32_t uses;
  // INSTEP_ACTION_STEP, INSTEP_ACTION_AVERAGE or INSTEP_ACTION_LEAVE.
  uint32_t action;
  // 1: each rank has its own parameter, and its gradient is not summed. 0: all ranks have the same parameter.
  uint32_t is_local;
  // Element type of the parameter and of its gradient. 0: the types that the precision of its group gives.
  uint32_t dtype;
} instep_param;

// The decision that follows from a norm.
typedef struct {
  // sizeof(instep_decision), set by the caller.
  size_t size;
  // The norm of all averaged gradients. It is infinite or NaN if a gradient is infinite or NaN.
  double norm;
  // The clip coefficient. It is 1 if nothing is clipped or all steps are skipped.
  double clip;
  // 1 if no gradient is infinite or NaN.
  uint32_t is_finite;
  // 1 if steps with this decision are skipped. They then change nothing.
  uint32_t is_skipped;
} instep_decision;

// The decisions about one pass, such as its clip coefficient and whether it was skipped.
typedef struct {
  // sizeof(instep_pass_status), set by the caller.
  size_t size;
  // The number of the pass, counted from 1. Abandoned passes count too. 0: no pass has ended.
  uint64_t pass;
  // Number of passes abandoned so far.
  uint64_t abandoned;
  // 1: the pass changed nothing, because a gradient was infinite or NaN.
  uint32_t is_skipped;
  // 1: `norm` is known.
  uint32_t has_norm;
  // The norm of all averaged gradients.
  double norm;
  // The clip coefficient. It is 1 without clipping.
  double clip;
  // The loss scale, by which the gradients were divided.
  double loss_scale;
  // The first bucket with an infinite or NaN gradient, or -1.
  int64_t first_nonfinite_bucket;
} instep_pass_status;

// A dynamic loss scale with the policy of torch.amp.GradScaler. Zeros mean the defaults given below.
typedef struct {
  // sizeof(instep_loss_scaler).
  size_t size;
  // The first pass's scale. Default: 65536.
  double initial_scale;
  // The scale is multiplied by this factor after growth_interval passes in a row without a skip. Default: 2.
  double growth_factor;
  // The scale is multiplied by this factor after a skipped pass. Default: 0.5.
  double backoff_factor;
  // Number of passes in a row without a skip after which the scale grows. Default: 2000.
  uint32_t growth_interval;
  // Zero. Anything else is refused.
  uint32_t reserved;
} instep_loss_scaler;

// One collective call of one rank.
typedef struct {
  // The size of instep_call in the library. It may be larger than in the caller's header.
  size_t size;
  // INSTEP_ALL_REDUCE or INSTEP_BROADCAST.
  uint32_t kind;
  // Element type: INSTEP_F32, INSTEP_BF16 or INSTEP_F16.
  uint32_t dtype;
  // The source, a range of `bytes` bytes.
  const void *src;
  // The destination, a range of `bytes` bytes. It may be the same address as the source.
  void *dst;
  // Length of the source and of the destination, in bytes.
  uint64_t bytes;
  // The number of the pass, counted from the stepper's first pass.
  uint64_t pass;
  // The number of the bucket, or -1 if the call is not for a bucket.
  int64_t bucket;
  // How long the call may wait for other ranks, in milliseconds.
  uint64_t deadline_ms;
  // On a GPU, the stream to enqueue on. Null on the CPU.
  void *stream;
  // 32 bytes that must be equal on all ranks. If they differ, the ranks are making different calls and would hang
  // later. In this case, return a failure.
  uint8_t key[32];
} instep_call;

// One rank's part in the caller's collective. The library copies this struct, and passes `data` to each function.
//
// A function may call only instep_version, instep_status_name and instep_last_error of this library. Any other call in
// it returns INSTEP_BUSY. If an exception leaves a function, the process ends. instep::caught, at the end of this
// header, turns an exception into a status.
typedef struct {
  // sizeof(instep_collective).
  size_t size;
  // The caller's data. Any thread may use it until instep_stepper_free has returned. If instep_stepper_create fails,
  // the library does not use the data.
  void *data;
  // Takes part in one collective call, and returns INSTEP_OK. Any other value ends the stepper. On the CPU the
  // function is called on a thread of the library, one call at a time. It may block until all ranks are done, and
  // must leave the result in `dst`. On a GPU the function is called on the thread that calls the stepper. It must
  // enqueue its work on the call's stream, and must not wait for it. Every rank makes the same calls in the same
  // order. Not null.
  instep_status (*enqueue)(void *data, const instep_call *call);
  // Ends the group: every rank's current call and all later calls must then fail. It must not block. `cause` is
  // valid during the call. The library may call this function on any thread, also during `enqueue`. The function may
  // be null if there is only one rank.
  void (*abort)(void *data, const char *cause);
  // instep_stepper_free calls this function once, when the library no longer uses `data`. The function may be null.
  void (*release)(void *data);
  // 1: the collective can also sum bf16.
  uint32_t sums_bf16;
  // 1: the collective can also sum f16.
  uint32_t sums_f16;
  // 1: the collective works on the memory of GPUs. 0: it works on the memory of the CPU.
  uint32_t reaches_gpus;
  // Zero. Anything else is refused.
  uint32_t reserved;
} instep_collective;

// Options of a stepper. Zeros mean defaults, except in layout and optimizer. The library reads these options, and the
// structs, lists and texts in them, only until the call returns, and never frees them. It uses the tensors, the
// collective's data and the stream until the stepper is freed.
typedef struct {
  // sizeof(instep_stepper_options).
  size_t size;
  // The model's parameters.
  instep_layout *layout;
  // The optimizer of all groups that `groups` does not name.
  const instep_optimizer *optimizer;
  // Groups with their own optimizers.
  const instep_group *groups;
  // The number of groups.
  size_t group_count;
  // Element types. Null: f32.
  const instep_precision *precision;
  // When steps run: INSTEP_MODE_EAGER, INSTEP_MODE_NORMED or INSTEP_MODE_SEQUENTIAL. All modes give each parameter
  // the same bits if nothing is clipped or skipped.
  uint32_t mode;
  // INSTEP_GRADIENTS_KEEP, _ZERO, _AVERAGE or _RELEASE.
  uint32_t gradients;
  // INSTEP_UNUSED_DEFAULT, INSTEP_UNUSED_SKIP, INSTEP_UNUSED_STEP_ZERO or INSTEP_UNUSED_REFUSE.
  uint32_t unused;
  // INSTEP_CLIP_NONE, _GLOBAL, _PREVIOUS or _PER_BUCKET.
  uint32_t clip;
  // The largest norm, if `clip` is set. Gradients with a larger norm are clipped to it.
  double max_norm;
  // 1: a pass with an infinite or NaN gradient changes nothing. Refused in INSTEP_MODE_EAGER.
  uint32_t skip_nonfinite;
  // Element type of copies. A step then writes a copy of each parameter that it steps. 0: there are no copies.
  uint32_t copy;
  // Decay rate of the parameters' moving averages. 0: there are no averages.
  double ema_decay;
  // The loss scale, by which steps divide the gradients. 0 means 1.
  double loss_scale;
  // A dynamic loss scale instead of loss_scale. Null: none.
  const instep_loss_scaler *loss_scaler;
  // Bytes of gradients per bucket. 0: 1 MiB for the first bucket, 25 MiB for all others. Only for buckets in the
  // stepper's own memory.
  uint64_t bucket_cap_bytes;
  // How long a collective waits for other ranks, in milliseconds. 0: the value of the environment variable
  // INSTEP_DEADLINE_MS, or 60,000 if it is not set.
  uint64_t deadline_ms;
  // Number of threads on which kernels run. 0: the value of the environment variable INSTEP_THREADS. If it is not
  // set, there is one thread per core, but at most 1024.
  uint32_t threads;
  // 1: the stepper's work runs on the thread that calls the stepper. Kernels still use further threads, unless
  // `threads` is 1. If `threads` is 1 too, the stepper starts no thread.
  uint32_t is_inline;
  // This rank, below world_size.
  uint32_t rank;
  // Number of ranks over which gradients are summed. 0 means 1. Steps divide the sums by this number.
  uint32_t world_size;
  // The collective that sums gradients over the ranks. Null: there is only one rank, or sums_by_caller is 1.
  const instep_collective *collective;
  // 1: the caller sums each bucket over all ranks, in place. On the CPU the caller hands a bucket over once the sum
  // is complete. On a GPU it hands the bucket over with an event after the sum, by
  // instep_stepper_bucket_ready_after. The library then broadcasts nothing, so parameters must be equal on all
  // ranks.
  uint32_t sums_by_caller;
  // Zero. Anything else is refused.
  uint32_t reserved;
  // The caller's tensors. Null: the stepper has its own.
  const instep_memory *memory;
  // The GPU. Null: the CPU.
  const instep_cuda *cuda;
  // Whether some ranks may run out of data before others: INSTEP_INPUTS_EVEN, _BY_WORLD_SIZE or _BY_CONTRIBUTORS.
  uint32_t inputs;
  // Zero. Anything else is refused.
  uint32_t reserved_too;
} instep_stepper_options;

// The call succeeded.
#define INSTEP_OK 0

// A pointer is null but must not be null. Nothing has changed.
#define INSTEP_NULL 1

// A handle was freed, is of another kind, or never came from this library. Nothing has changed.
#define INSTEP_HANDLE 2

// Another thread is in a call on the same handle, or the call was made by a callback. Nothing has changed; call again.
#define INSTEP_BUSY 3

// This process was forked from one that uses the library, and does not have the library's threads. Nothing has
// changed.
#define INSTEP_FORKED 4

// An integer has no meaning, a text is not UTF-8, a length is wrong, or a struct has a wrong size. Nothing has
// changed.
#define INSTEP_ARGUMENT 5

// An option or hyperparameter is out of range, or two options exclude each other. Nothing has changed.
#define INSTEP_CONFIG 6

// A parameter or tensor is unknown, named twice, missing, of another length, or misaligned. Nothing has changed.
#define INSTEP_LAYOUT 7

// The call comes at the wrong moment of a pass. Nothing has changed.
#define INSTEP_ORDER 8

// This machine, this build, or a part such as the collective does not support the call. Nothing has changed.
#define INSTEP_UNSUPPORTED 9

// The GPU kernels, the GPU's driver or its communication library is missing. Nothing has changed.
#define INSTEP_UNAVAILABLE 10

// A call into the GPU's driver failed.
#define INSTEP_DEVICE 11

// A collective failed, ranks differ, a rank is lost, or the deadline has passed.
#define INSTEP_COLLECTIVE 12

// The self-test of the compiled kernels failed, because they do not round as the library requires. Nothing has
// changed.
#define INSTEP_ARITHMETIC 13

// A checkpoint is damaged, or belongs to another model. The text of instep_last_error says whether anything has
// changed.
#define INSTEP_CHECKPOINT 14

// A file could not be opened, read or written.
#define INSTEP_FILE 15

// An earlier failure ended this stepper or bucket step. The text of instep_last_error names that failure. Free the
// handle.
#define INSTEP_POISONED 16

// The library has a bug that caused a panic in this call or in an earlier call on this handle. Free the handle, and
// report the bug.
#define INSTEP_PANIC 17

// A callback threw a C++ exception, and instep::caught of this header has caught it.
#define INSTEP_THREW 18

// A failure for which this version has no code. The text of instep_last_error describes it.
#define INSTEP_OTHER 19

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Copies a tensor to `values`, converted to f32 from its element type. Between passes, any tensor can be read. In a
// pass, only a parameter can be read, or a gradient that was written in that pass. `count` is the number of elements
// of the tensor's parameter.
//
// Any thread may call it, one at a time. It waits for the last step of the tensor's bucket if the tensor is a
// parameter, a copy, or (in a pass) a gradient. For any other tensor it waits for all steps.
instep_status instep_stepper_read(instep_stepper *stepper, instep_tensor_id tensor, float *values, size_t count);

// Copies `values` to a tensor, rounded to its type. Write a gradient in a pass, and any other tensor between passes. A
// tensor of kind INSTEP_COPY cannot be written, because only steps write it. `count` is the number of elements of the
// tensor's parameter. If one rank writes a parameter, every rank must write this parameter. The next pass then
// broadcasts rank 0's values of all parameters in the written parameter's bucket. States and moving averages are not
// broadcast, so write them on every rank. Step counts are not written with the states: set them on every rank with
// instep_stepper_set_progress.
//
// Any thread may call it, one at a time. In a pass it waits for the last step of the gradient's bucket. Between passes
// it waits for all steps.
instep_status instep_stepper_write(instep_stepper *stepper, instep_tensor_id tensor, const float *values, size_t count);

// Returns the address of a tensor, and writes its type to `*out_dtype`, which may be null. 8-bit states have no
// address. `access` is INSTEP_READ or INSTEP_WRITE. In a pass, a call with INSTEP_WRITE marks a gradient as written.
// Until the caller writes the gradient, its memory still has the values of the previous pass.
//
// In a pass the address is valid until the parameter is handed over, or the micro-batch ends. Between passes it is
// valid until the next call on this stepper. On a GPU, work that is enqueued on compute_stream in this time may use
// the address. On a GPU only gradients may be written through an address, and a call with INSTEP_READ marks a gradient
// as written too.
//
// Any thread may call it, one at a time. On the CPU, a call with INSTEP_READ waits as instep_stepper_read does, and a
// call with INSTEP_WRITE waits as instep_stepper_write does. On a GPU, compute_stream waits instead of the calling
// thread.
instep_status instep_stepper_address(instep_stepper *stepper,
                                     instep_tensor_id tensor,
                                     uint32_t access,
                                     void **out_address,
                                     uint32_t *out_dtype);

// Gives new addresses to a stepper that was created with the caller's memory. Parameters and buckets that are left out
// keep their addresses. `*out_is_recut` is 1 if the buckets have changed in more than their addresses, otherwise 0.
// out_is_recut may be null. States and step counts stay with their parameters. Copy each parameter's values to its new
// address before this call.
//
// Any thread may call it between passes, one at a time. On the CPU it waits for all steps, so the stepper does not
// touch the old memory after the call. On a GPU, work that is enqueued on compute_stream after the call runs after all
// work that touches the old memory.
instep_status instep_stepper_rebind(instep_stepper *stepper, const instep_memory *tensors, uint32_t *out_is_recut);

// Takes part in one pass without data. A rank that has run out of data repeats this call until `*out_goes_on` is 0.
// The value 0 means that no rank had data, so nothing was stepped. With INSTEP_INPUTS_EVEN the call is refused.
//
// Any thread may call it between passes, one at a time. It waits for the pass's last sum.
instep_status instep_stepper_join(instep_stepper *stepper, uint32_t *out_goes_on);

// Rebuilds the stepper's own buckets in the order in which rank 0 handed its gradients over. The training's results
// have the same bits with and without this call. `*out_is_rebuilt` is 0 if the buckets already have this order.
// out_is_rebuilt may be null. Addresses that were returned before this call are invalid after it. If the buckets are
// in the caller's memory, rebuild them yourself and call instep_stepper_rebind.
//
// Any thread may call it between passes, one at a time. It waits for all steps, and for rank 0's call.
instep_status instep_stepper_rebuild_buckets(instep_stepper *stepper, uint32_t *out_is_rebuilt);

// Writes only the parameters to a safetensors file for other programs. A file at the path is replaced atomically. If
// `averages` is 1, moving averages are written instead. If `is_f32` is 1, all values are written as f32, and masters
// are written in place of parameters that have them. Only rank 0 writes.
//
// Any thread may call it between passes, one at a time. It waits for all steps.
instep_status instep_stepper_export(instep_stepper *stepper, const char *path, uint32_t averages, uint32_t is_f32);

// Creates a bucket step. If the call succeeds, it writes the handle to `*out_step`.
//
// Any thread may call it. No other thread may use the layout during the call. The library starts no thread before the
// first step.
instep_status instep_bucket_step_create(const instep_bucket_step_options *options, instep_bucket_step **out_step);

// Steps the bucket. On the CPU the step is complete when the call returns. On a GPU the call launches the step on
// `stream`. On that stream, the sum of the gradients must come before the step. If the call is refused, nothing is
// written.
//
// If `norm` is not null, call instep_norm_decide on it first. The step is then clipped or skipped as that call has
// decided, and `scaling` must be null. If `norm` is null, `scaling` gives the factors that the gradients contain, such
// as the number of ranks. If both are null, the step uses the gradients as they are.
//
// Any thread may call it, but only one at a time may use the step or the norm. `stream` (cudaStream_t or CUstream)
// must belong to the bucket step's GPU, must live until the step on it has ended, and must not be in a capture. Null
// is the legacy default stream. For the CPU, pass null.
instep_status instep_bucket_step_step(instep_bucket_step *step,
                                      const instep_tensors *tensors,
                                      const instep_scaling *scaling,
                                      instep_norm *norm,
                                      void *stream);

// Repeats the last call of instep_bucket_step_step that was not refused, on the same tensors. It does not read or
// check the list of tensors again, which saves much of the time of a small step. It returns INSTEP_ORDER if there was
// no such call, or if instep_norm_add was called after that call. The tensors must still be valid and must not
// overlap.
//
// Any thread may call it, one at a time. It works only on the CPU: on a GPU it returns INSTEP_UNSUPPORTED.
instep_status instep_bucket_step_step_again(instep_bucket_step *step, const instep_scaling *scaling);

// Sets the learning rate of a group from the next step on. If `group` is null, this is the group "default". All other
// hyperparameters stay as they are. Use this call for learning-rate schedules.
//
// Any thread may call it, one at a time. It never waits for a GPU.
instep_status instep_bucket_step_set_lr(instep_bucket_step *step, const char *group, double lr);

// Sets the given hyperparameters of a group from the next step on. If `group` is null, this is the group "default". If
// one hyperparameter is refused, none is set. Other hyperparameters stay as they are. The new hyperparameters must
// need the same states as the hyperparameters at creation.
//
// Any thread may call it, one at a time. It never waits for a GPU.
instep_status instep_bucket_step_set_hyper(instep_bucket_step *step,
                                           const char *group,
                                           const instep_hyper *hypers,
                                           size_t hyper_count);

// Replaces all hyperparameters of a group's optimizer from the next step on. If `group` is null, this is the group
// "default". Hyperparameters that you leave out get their defaults, even if they were set before. To change only some,
// call instep_bucket_step_set_lr or _set_hyper. The new optimizer must have the same name and the same states as the
// old one. Step counts and states do not change.
//
// Any thread may call it, one at a time. It never waits for a GPU.
instep_status instep_bucket_step_set_optimizer(instep_bucket_step *step,
                                               const char *group,
                                               const instep_optimizer *optimizer);

// Writes a parameter's number of updates to `*out_count`, and NAdam's product of momenta to `*out_carried`. For other
// optimizers, `*out_carried` is 1. Either pointer may be null.
//
// Any thread may call it, one at a time. On a GPU it waits for the last step.
instep_status instep_bucket_step_progress(instep_bucket_step *step,
                                          uint32_t param,
                                          uint64_t *out_count,
                                          double *out_carried);

// Sets the numbers that instep_bucket_step_progress reads, to resume a training. For NAdam with a count above 0,
// `carried` is the product of momenta. In all other cases, `carried` is 1. A count of 2^63 or more is refused.
//
// Any thread may call it, one at a time. On a GPU it waits for the last step.
instep_status instep_bucket_step_set_progress(instep_bucket_step *step, uint32_t param, uint64_t count, double carried);

// Adds the summed gradients of a bucket to a norm. Add each bucket once between instep_norm_begin and
// instep_norm_decide, in any order. Parameters that are frozen or have no gradient are left out. A bucket with only
// such parameters still counts as added.
//
// Any thread may call it, but only one at a time may use the norm or the step. The gradients are only read.
instep_status instep_norm_add(instep_norm *norm, instep_bucket_step *step, const instep_tensor *grads, void *stream);

// Frees a bucket step. Null is allowed and does nothing.
//
// Any thread may call it, one at a time. If another thread uses the step, this returns INSTEP_BUSY and does not free
// it. On a GPU it waits for the last step.
instep_status instep_bucket_step_free(instep_bucket_step *step);

// Saves parameters, states, step counts and `scalars` to a file, which is replaced atomically. Only rank 0 writes. On
// any other rank the call does nothing and returns at once. `scalars` may be null if `scalar_count` is 0.
//
// Any thread may call it between passes, one at a time. It waits for all steps.
instep_status instep_stepper_save(instep_stepper *stepper,
                                  const char *path,
                                  const instep_scalar *scalars,
                                  size_t scalar_count);

// Loads a checkpoint into a stepper of the same parameters and optimizers, and sets the values of `scalars` from it.
// Every rank loads the same file. Nothing changes before the whole file has been checked.
//
// Any thread may call it between passes, one at a time. It waits for all steps.
instep_status instep_stepper_load(instep_stepper *stepper, const char *path, instep_scalar *scalars, size_t scalar_count);

// Returns the version of the library, such as "0.1.0". The text lives as long as the process.
//
// May be called on any thread at any time, in callbacks and in forked children too.
const char *instep_version(void);

// Returns the name of a status, such as "INSTEP_OK". The text lives as long as the process.
//
// May be called on any thread at any time, in callbacks and in forked children too.
const char *instep_status_name(instep_status status);

// Returns the error of the last failed call on the calling thread: `<thing>: <what is wrong>; <what to do>`. The text
// is empty if no call has failed. The library owns the text. It is valid until another call of this thread fails.
//
// May be called on any thread at any time, in callbacks and in forked children too.
const char *instep_last_error(void);

// Creates a layout without parameters. If the call succeeds, it writes the handle to `*out_layout`.
//
// Any thread may call it.
instep_status instep_layout_create(instep_layout **out_layout);

// Adds a parameter and writes its number to `*out_param`: 0, 1, 2 and so on. `out_param` may be null. Add parameters
// in the order in which the forward pass uses them. The first use of the layout closes it. After that, this call
// returns INSTEP_ORDER.
//
// Any thread may call it, one at a time. The struct is copied. If a name is used twice, or a shape is too large, the
// first use of the layout fails.
instep_status instep_layout_add(instep_layout *layout, const instep_param *param, uint32_t *out_param);

// Finds the number of a parameter by its name. If no parameter has the name, it returns INSTEP_LAYOUT, and
// instep_last_error lists similar names. This call closes the layout.
//
// Any thread may call it, one at a time.
instep_status instep_layout_find(instep_layout *layout, const char *name, uint32_t *out_param);

// Frees a layout. Null is allowed and does nothing.
//
// Any thread may call it, one at a time. If another thread uses the layout, this returns INSTEP_BUSY and does not free
// it.
instep_status instep_layout_free(instep_layout *layout);

// Creates a norm for buckets on a GPU, or on the CPU if `on` is null. If the call succeeds, it writes the handle to
// `*out_norm`.
//
// Any thread may call it.
instep_status instep_norm_create(const instep_cuda *on, instep_norm **out_norm);

// Begins a new norm. `scaling` gives the factors that all gradients contain, such as the number of ranks. Null means
// that they contain none. A clip in `scaling` is refused, because the norm decides the clip.
//
// Any thread may call it, one at a time. On a GPU, the work of each call on a norm is enqueued on the `stream` of that
// call. It runs after the work of the previous call on this norm, even if that call had another stream. The conditions
// for `stream` are those of instep_bucket_step_step.
instep_status instep_norm_begin(instep_norm *norm, const instep_scaling *scaling, void *stream);

// Decides the clip coefficient, and whether the steps are skipped. Gradients with a norm above `max_norm` are clipped
// to `max_norm`. If it is 0, nothing is clipped. If `skip_nonfinite` is 1 and a gradient is infinite or NaN, all steps
// are skipped. After this call, step each added bucket once with this norm. The call is refused if no bucket was
// added.
//
// Any thread may call it, one at a time.
instep_status instep_norm_decide(instep_norm *norm, double max_norm, uint32_t skip_nonfinite, void *stream);

// Reads the decision.
//
// Any thread may call it, one at a time. On a GPU it waits for the work of the last call on this norm.
instep_status instep_norm_read(instep_norm *norm, instep_decision *out_decision);

// Frees a norm. Null is allowed and does nothing.
//
// Any thread may call it, one at a time. If another thread uses the norm, this returns INSTEP_BUSY and does not free
// it.
instep_status instep_norm_free(instep_norm *norm);

// Writes the name of one of the optimizer's states to `*out_name`. `index` counts the states from 0. The names are
// those of torch.optim. If there is no state with this index, null is written. The text lives as long as the process.
// In instep_tensors the states are in the order of `index`. Checkpoints use the same names.
//
// Any thread may call it.
instep_status instep_optimizer_state_name(const instep_optimizer *optimizer, size_t index, const char **out_name);

// Opens a pass: one forward and backward. A `micro_batches` of 0 or 1 means one micro-batch. With several
// micro-batches, the caller writes a gradient in the first micro-batch and adds to it in later ones. Buckets are
// stepped in the last micro-batch. The first pass broadcasts rank 0's parameters. After a write of a parameter, the
// next pass broadcasts all parameters of that parameter's bucket.
//
// Any thread may call it, one at a time. On a GPU, if parameters were written before this call, it waits until the
// other ranks make this call too. Otherwise it does not wait.
instep_status instep_stepper_begin(instep_stepper *stepper, uint32_t micro_batches);

// Begins the next micro-batch. The caller may then use every parameter and gradient again. The values of the gradients
// do not change.
//
// Any thread may call it, one at a time. It does not wait.
instep_status instep_stepper_next_micro_batch(instep_stepper *stepper);

// Hands over a parameter. This says that its gradient is complete, and that the caller no longer uses the parameter or
// the gradient in this pass. Once all parameters of the bucket are handed over, the bucket is reduced. The option
// `mode` decides when the bucket is stepped. After the hand-over, addresses of the parameter and of its gradient are
// invalid.
//
// Any thread may call it, one at a time. It waits only if the option `is_inline` is 1. On a GPU, the sum and the step
// run after the work that is on compute_stream at the time of the call.
instep_status instep_stepper_grad_ready(instep_stepper *stepper, uint32_t param);

// Hands over all parameters of a bucket. Buckets in the caller's memory are numbered in the order of
// instep_memory.buckets. With sums_by_caller, the call also says that the bucket's sum is complete. On a GPU with
// sums_by_caller, call instep_stepper_bucket_ready_after instead.
//
// Any thread may call it, one at a time. It waits as instep_stepper_grad_ready does.
instep_status instep_stepper_bucket_ready(instep_stepper *stepper, uint32_t bucket);

// Hands over all parameters of a bucket on a GPU with sums_by_caller. The bucket's step waits for `event` (cudaEvent_t
// or CUevent). The caller must have recorded the event in this pass, after the bucket's sum. The sum must come after
// the pass's last write of a gradient in the bucket, and after its last read of a parameter in the bucket. If the
// event was never recorded, or was recorded too early, the step races with the sum. This call enqueues the wait, so
// the event may be destroyed or recorded again after the call.
//
// Any thread may call it, one at a time. It does not wait.
instep_status instep_stepper_bucket_ready_after(instep_stepper *stepper, uint32_t bucket, void *event);

// Declares parameters for which no rank has a gradient, so that the open pass does not step them. All ranks must
// declare the same parameters, before they hand them over. If such a parameter's gradient was written, the gradient is
// discarded. With INSTEP_UNUSED_SKIP the call is refused, because the stepper then finds unused parameters itself.
//
// Any thread may call it, one at a time. It does not wait.
instep_status instep_stepper_set_unused(instep_stepper *stepper, const uint32_t *params, size_t param_count);

// Closes the pass. A parameter with a written gradient is handed over, if the caller has not done so. The option
// `unused` says what happens to parameters without a gradient. With sums_by_caller, only the caller's hand-over says
// that a bucket's sum is complete. The call therefore returns INSTEP_ORDER if a bucket has written gradients and was
// not handed over. After INSTEP_ORDER the pass is still open, and can be completed or abandoned.
//
// Any thread may call it, one at a time. It does not wait: steps overlap with later work, and the next access to a
// tensor waits for the tensor's bucket.
instep_status instep_stepper_finish(instep_stepper *stepper);

// Abandons the pass. A bucket is launched when its sum and its step are given to the device. The gradients of buckets
// that were not launched are discarded. In INSTEP_MODE_EAGER, the launched buckets stay stepped. Their count is
// written to `*out_count`, and the numbers of the first `capacity` of them to `out_buckets`. Both pointers may be
// null.
//
// Any thread may call it, one at a time. It waits only if the pass broadcasts parameters. All ranks must abandon the
// pass after the same bucket.
instep_status instep_stepper_abandon(instep_stepper *stepper, uint32_t *out_buckets, size_t capacity, size_t *out_count);

// Sets the learning rate of a group from the next pass on. If `group` is null, this is the group "default". All other
// hyperparameters stay as they are. All ranks set the same value. Use this call for learning-rate schedules.
//
// Any thread may call it between passes, one at a time. It does not wait for steps.
instep_status instep_stepper_set_lr(instep_stepper *stepper, const char *group, double lr);

// Sets the given hyperparameters of a group from the next pass on. If `group` is null, this is the group "default". If
// one hyperparameter is refused, none is set. Other hyperparameters stay as they are. All ranks set the same values.
//
// Any thread may call it between passes, one at a time. It does not wait for steps.
instep_status instep_stepper_set_hyper(instep_stepper *stepper,
                                       const char *group,
                                       const instep_hyper *hypers,
                                       size_t hyper_count);

// Replaces all hyperparameters of a group's optimizer from the next pass on. If `group` is null, this is the group
// "default". Hyperparameters that you leave out get their defaults, even if they were set before. To change only some,
// call instep_stepper_set_lr or _set_hyper. The optimizer must have the same name. All ranks set the same values.
//
// Any thread may call it between passes, one at a time. It does not wait for steps.
instep_status instep_stepper_set_optimizer(instep_stepper *stepper, const char *group, const instep_optimizer *optimizer);

// Freezes a parameter from the next pass on, or unfreezes it. A frozen parameter takes no gradient and is not
// stepped. All ranks freeze the same parameters.
//
// Any thread may call it between passes, one at a time. If `is_frozen` is 1, it waits for the last step of the
// parameter's bucket.
instep_status instep_stepper_set_frozen(instep_stepper *stepper, uint32_t param, uint32_t is_frozen);

// Writes a parameter's number of updates to `*out_count`, and NAdam's product of momenta to `*out_carried`. For other
// optimizers, `*out_carried` is 1. Either pointer may be null.
//
// Any thread may call it between passes, one at a time. It waits for all steps.
instep_status instep_stepper_progress(instep_stepper *stepper, uint32_t param, uint64_t *out_count, double *out_carried);

// Sets the numbers that instep_stepper_progress reads, to resume a training without a checkpoint of this library. For
// NAdam with a count above 0, `carried` is the product of momenta. In all other cases, `carried` is 1. A count of 2^63
// or more is refused. All ranks set the same values.
//
// Any thread may call it between passes, one at a time. It waits for all steps.
instep_status instep_stepper_set_progress(instep_stepper *stepper, uint32_t param, uint64_t count, double carried);

// Reads the loss scale of the open pass, or, between passes, the scale of the next pass.
//
// Any thread may call it, one at a time. With the option loss_scaler it waits for the decision of the previous pass,
// so call it only after forward.
instep_status instep_stepper_loss_scale(instep_stepper *stepper, double *out_loss_scale);

// Reads a norm of the last pass's averaged gradients, and whether this norm is known. If `group` is null, this is the
// group "default". If the group is clipped alone, the norm covers only this group. If the group is not clipped, the
// norm covers all groups that are not clipped. Otherwise it is the norm in instep_pass_status. No norm is
// known until instep_pass_status has one, or between instep_stepper_rebuild_buckets and the next pass.
//
// Any thread may call it between passes, one at a time. It waits for all steps.
instep_status instep_stepper_group_norm(instep_stepper *stepper,
                                        const char *group,
                                        double *out_norm,
                                        uint32_t *out_has_norm);

// Reads the decisions about a pass. If `waits` is 1, they are those of the last pass. If `waits` is 0, they are those
// of the newest pass that is known to have ended.
//
// Any thread may call it, one at a time. If `waits` is 1, it may be called only between passes, and waits for all
// steps. If `waits` is 0, it never waits.
instep_status instep_stepper_status(instep_stepper *stepper, uint32_t waits, instep_pass_status *out_status);

// Creates a stepper. If the call succeeds, it writes the handle to `*out_stepper`.
//
// Any thread may call it. No other thread may use the layout during the call. The library starts its threads at the
// first pass.
instep_status instep_stepper_create(const instep_stepper_options *options, instep_stepper **out_stepper);

// Waits for all steps, frees the stepper, and reports failures. If it returns INSTEP_BUSY, INSTEP_HANDLE or
// INSTEP_FORKED, nothing is freed. INSTEP_ORDER means that a pass was open. In this case the stepper is freed, and the
// other ranks' steppers end with an error. Null is allowed and does nothing.
//
// Any thread may call it, one at a time. If a queued sum needs other ranks, the call waits for them up to the
// deadline.
instep_status instep_stepper_free(instep_stepper *stepper);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* INSTEP_H */

#if defined(__cplusplus)
namespace instep {
/*
 * Makes a callback of a function that may throw. An exception becomes INSTEP_THREW, which ends the stepper:
 * `collective.enqueue = instep::caught<sum>;`
 */
template <instep_status (*function)(void *, const instep_call *)>
instep_status caught(void *data, const instep_call *call) noexcept {
  try {
    return function(data, call);
  } catch (...) {
    return INSTEP_THREW;
  }
}
} /* namespace instep */
#endif
