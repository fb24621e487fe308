/* This file defines every struct that crosses between Rust, C++ and CUDA, and nothing else.
 *
 * The file is C99, so that bindgen, a C compiler, g++ and nvcc read the same text. `cargo run -p bindings` generates
 * src/abi.rs and abi_layout.h from it. With abi_layout.h each compiler checks that the layout equals the one in Rust.
 * Members have fixed widths, and there is no implicit padding. No other struct crosses. */
#ifndef INSTEP_ABI_H
#define INSTEP_ABI_H

#include <stdint.h>

/* Norm leaves, shard cuts and segment starts are multiples of this many elements from the start of a parameter.
 * Therefore no cut of the work can move a block boundary. */
#define INSTEP_QUANTUM 256
/* Number of elements of a full tile: the unit of work of one thread block or one pool task. */
#define INSTEP_TILE_ELEMENTS 2048
/* Largest number of tiles that a kernel may take as one run; places inside it are below 2^31. */
#define INSTEP_LONGEST_RUN 524288
/* Number of threads per block of every GPU kernel; in the step each thread takes four elements at a time. */
#define INSTEP_GPU_THREADS 256
/* 22 limbs of 32 bits hold any sum of 2^32 leaf sums exactly; see norm.h. */
#define INSTEP_NORM_LIMBS 22
/* Largest number of optimizer states per parameter. */
#define INSTEP_MAX_STATES 3
/* The number of different records, and of all records, that fit into a step's own argument. With the rest of
 * InstepStepLaunch they fill the 4,096 bytes that every driver accepts as arguments. */
#define INSTEP_GIVEN_RECORDS 24
#define INSTEP_GIVEN_INDICES 1392
#define INSTEP_NO_BUCKET 0xffffffffu
#define INSTEP_F32_INFINITY_BITS 0x7f800000u

enum InstepOptimizer {
#define OPTIMIZER(name, Rule, min_states, max_states) INSTEP_OPTIMIZER_##name,
#include "optimizers.def"
#undef OPTIMIZER
    INSTEP_OPTIMIZER_COUNT,
    INSTEP_OPTIMIZER_CUSTOM = INSTEP_OPTIMIZER_COUNT /* the user's own code, called between launches */
};

/* The formats in which elements are stored; arithmetic is f32 throughout. */
enum InstepDtype { INSTEP_DTYPE_F32 = 0, INSTEP_DTYPE_BF16 = 1, INSTEP_DTYPE_F16 = 2 };

/* The master weights of a 16-bit parameter, with the same places as the states; see remainder.h. */
enum InstepMaster {
    INSTEP_MASTER_NONE = 0,
    INSTEP_MASTER_F32 = 1,
    INSTEP_MASTER_REMAINDER16 = 2, /* the lower half of an f32 whose upper half is the bf16 parameter */
    INSTEP_MASTER_REMAINDER8 = 3   /* the next 8 bits of it */
};

/* The formats in which states are stored: one of the dtypes, or codes (codes.h). */
enum InstepMoments {
    INSTEP_MOMENTS_F32 = INSTEP_DTYPE_F32,
    INSTEP_MOMENTS_BF16 = INSTEP_DTYPE_BF16,
    INSTEP_MOMENTS_8BIT = 3
};

/* The action of the step on a segment. */
enum InstepSegmentAction {
    INSTEP_ACTION_STEP = 0,    /* apply the optimizer */
    INSTEP_ACTION_AVERAGE = 1, /* multiply the gradient by 1/divisor in place */
    INSTEP_ACTION_LEAVE = 2    /* touch nothing */
};

/* Hyperparameters as the user gave them, f64; scalars are derived from them once per pass and record. */
typedef struct InstepSgdHyper {
    double lr, momentum, dampening, weight_decay;
    uint32_t nesterov, maximize;
} InstepSgdHyper;

typedef struct InstepAdamHyper {
    double lr, beta1, beta2, eps, weight_decay;
    uint32_t decoupled, amsgrad, maximize, reserved;
} InstepAdamHyper;

typedef struct InstepAdagradHyper {
    double lr, lr_decay, weight_decay, initial_accumulator_value, eps;
    uint32_t maximize, reserved;
} InstepAdagradHyper;

typedef struct InstepRmsPropHyper {
    double lr, alpha, eps, weight_decay, momentum;
    uint32_t centered, maximize;
} InstepRmsPropHyper;

typedef struct InstepAdadeltaHyper {
    double lr, rho, eps, weight_decay;
    uint32_t maximize, reserved;
} InstepAdadeltaHyper;

typedef struct InstepAdamaxHyper {
    double lr, beta1, beta2, eps, weight_decay;
    uint32_t maximize, reserved;
} InstepAdamaxHyper;

typedef struct InstepRpropHyper {
    double lr, eta_minus, eta_plus, step_size_min, step_size_max;
    uint32_t maximize, reserved;
} InstepRpropHyper;

typedef struct InstepLionHyper {
    double lr, beta1, beta2, weight_decay;
    uint32_t maximize, reserved;
} InstepLionHyper;

typedef struct InstepNAdamHyper {
    double lr, beta1, beta2, eps, weight_decay, momentum_decay;
    uint32_t decoupled, maximize;
} InstepNAdamHyper;

typedef struct InstepRAdamHyper {
    double lr, beta1, beta2, eps, weight_decay;
    uint32_t decoupled, maximize;
} InstepRAdamHyper;

typedef struct InstepLambHyper {
    double lr, beta1, beta2, eps, weight_decay;
    uint32_t maximize, reserved;
} InstepLambHyper;

typedef struct InstepAdEmaMixHyper {
    double lr, beta1, beta2, beta3, alpha, eps, weight_decay;
    uint32_t maximize, reserved;
} InstepAdEmaMixHyper;

typedef struct InstepCustomHyper {
    double lr;
} InstepCustomHyper;

typedef union InstepHyper {
#define OPTIMIZER(name, Rule, min_states, max_states) Instep##Rule##Hyper name;
#include "optimizers.def"
#undef OPTIMIZER
    InstepCustomHyper custom;
    double words[8];
} InstepHyper;

/* The arguments of the user's own code. Begin writes the first two; the launch before that code writes the others. */
typedef struct InstepCustomScalars {
    double lr;
    uint64_t step;     /* of this update, from 1 */
    float multiplier;  /* of the summed gradient */
    uint32_t action;   /* INSTEP_ACTION_STEP; or INSTEP_ACTION_LEAVE, and nothing may change */
} InstepCustomScalars;

/* The scalars that Begin derives for one update: `custom`, or the struct in the rule's header. Only the kernels read
 * that struct. */
typedef union InstepScalars {
    InstepCustomScalars custom;
    uint64_t words[6];
} InstepScalars;

/* A record in control memory, one per segment and optimizer that steps it. `steps` counts the updates that happened.
 * `stepped` says that the last pass made one, and Begin adds it. A skipped or abandoned pass therefore never advances
 * bias correction. */
typedef struct InstepRecord {
    uint64_t steps;
    uint32_t stepped;
    uint32_t hyper;     /* index of its hyperparameters */
    uint32_t action;
    uint16_t optimizer;  /* INSTEP_OPTIMIZER_ */
    uint16_t grad_dtype; /* of the bucket's gradients, and of the counts of ranks after them */
    uint64_t tail; /* address of its count in the bucket's tail block, or 0: after the SUM, how many ranks had a
                    * gradient for it; 0.0 means none, and then the step leaves the segment alone */
    uint64_t contributors; /* the same for its bucket: how many ranks had data in this pass */
    double carried[2]; /* a number that the rule carries from update to update, NAdam's product of momenta: as it is,
                        * and as it will be if this pass steps; 1 in all others and before the first update */
    InstepScalars scalars;
} InstepRecord;

/* Two sums of squares over a whole parameter: of the parameter before the update, and of the change. They serve a rule
 * whose change is scaled by the roots of these sums. */
typedef struct InstepNorms {
    uint64_t limbs[2][INSTEP_NORM_LIMBS]; /* exact, norm.h */
    uint32_t nonfinite[2]; /* 1 if a magnitude is infinite or a NaN, else 0; or the ranks that have one */
} InstepNorms;

/* Values that change from pass to pass and are decided on the device. */
typedef struct InstepControl {
    float next_loss_scale;             /* of the next pass, if dynamic. Only Decide writes this and the tracker, */
    uint32_t growth_tracker;           /* so the trainer reads it beside steps: finite passes since the scale changed */
    uint64_t limbs[INSTEP_NORM_LIMBS]; /* sum of squares of the reduced gradients, exact */
    uint64_t passes;                   /* begun so far, this one included */
    double norm;                       /* of the averaged gradients, after Decide */
    double previous_norm;              /* the last finite one, for the next pass to clip by; negative: none yet */
    double clip;                       /* coefficient that Begin or Decide chose; 1 without clipping or when skipped */
    double max_norm;                   /* of a further clip set, set for good; negative: it is not clipped */
    double divisor;                    /* ranks to take the mean over; 0: as many as contributed */
    double loss_scale;                 /* factor in this pass's loss, divided out */
    float multiplier;                  /* applied to every gradient that is stepped, once the divisor is known */
    float average_multiplier;          /* applied to Average segments: 1/divisor, likewise */
    float local_multiplier;            /* applied to gradients that are not summed over ranks: 1/loss_scale */
    uint32_t reserved;
    uint32_t max_abs_bits;             /* largest |gradient| as bits: above infinity's means NaN */
    uint32_t first_nonfinite_bucket;   /* INSTEP_NO_BUCKET if none */
    uint32_t skip;                     /* the pass must change no parameter */
    uint32_t decided;                  /* Decide has run in this pass, so norm, clip and skip are its */
} InstepControl;

/* One contiguous run of one segment. A tile is self-contained: no lookup depends on another. It has 64 bytes. */
typedef struct InstepTile {
    uint64_t param;        /* of its first element, in bytes from param_base */
    uint64_t grad_offset;  /* elements from the launch's gradient base */
    uint64_t state_offset; /* elements from each state's base */
    uint64_t element;      /* number of its first element in the whole layout, in registration order; random.h */
    uint32_t count;
    uint32_t record;
    uint32_t first; /* this tile opens its segment and writes its record's `stepped` flag */
    uint32_t first_record; /* the segment's first optimizer's, which has as many updates as the parameter */
    uint32_t run;          /* of a full tile: full tiles from this one on that follow one another in every stream, at
                            * most INSTEP_LONGEST_RUN; else 1 */
    uint32_t bucket;       /* its bucket, counted from the launch's first one */
    uint32_t reserved[2];
} InstepTile;

typedef struct InstepBeginArgs {
    InstepControl* control;
    InstepRecord* records;
    InstepHyper* hypers;
    double* lr_multipliers; /* one per record */
    uint32_t* actions;      /* one action per record, as the trainer last set them */
    uint64_t record_count;
    InstepNorms* norms;     /* one per record, emptied; or null */
    const uint32_t* ring; /* on a GPU, slots of settings that the host writes ahead: Begin copies number `passes` modulo
                           * `slot_count` to `hypers` and the arrays after it; null: they are there already */
    uint64_t slot_words;
    uint64_t slot_count;
    double divisor;
    double loss_scale;        /* 0: as the control block says */
    double previous_max_norm; /* clips by the norm of the pass before; negative: no clipping */
    double clip;              /* a clip coefficient that the caller knows; 1: no clipping */
    const float* grad_scale;  /* a loss scale that another program keeps, in the place of `loss_scale`; or null */
    const float* found_inf;   /* that program's flag: if it is not 0, the pass changes nothing; or null */
    InstepControl* further_controls; /* blocks of single buckets or of further clip sets, opened like `control` */
    uint64_t further_count;
} InstepBeginArgs;

typedef struct InstepDecideArgs {
    InstepControl* control;
    const void* contributors;  /* any bucket's count of ranks that had data, in grad_dtype, or null */
    double max_norm;           /* of `control`; negative: no clipping */
    double growth_factor;      /* of a dynamic loss scale, and what it is multiplied by in a skipped pass */
    double backoff_factor;
    double largest_loss_scale; /* that divides out as a normal f32 */
    uint32_t skip_nonfinite;
    uint32_t growth_interval;    /* 0: the loss scale is constant */
    InstepControl* pass_control; /* the pass's block, if `control` is that of one bucket; else null */
    uint32_t bucket;             /* which one */
    uint32_t grad_dtype;
    float* found_inf; /* the flag of another program's loss scaler: not 0 makes the pass change nothing, and 1 is written
                       * if it changes nothing, else 0; or null */
    InstepControl* set_controls; /* blocks of the further clip sets, which have norms of their own and skip as `control` does */
    uint64_t set_count;
} InstepDecideArgs;

/* A rule that is scaled by norms of the whole parameter needs two launches, one after the other. */
enum InstepStepPart {
    INSTEP_PART_WHOLE = 0,
    INSTEP_PART_MEASURE = 1, /* moves the states and adds to the norms; parameters stay */
    INSTEP_PART_APPLY = 2,   /* reads the states, and does the rest */
    INSTEP_PART_END = 3      /* steps nothing: it ends the gradients that the user's own code has stepped with */
};

/* What a launch leaves in the gradients of Step segments, also in a skipped pass. */
enum InstepGradients {
    INSTEP_GRADIENTS_KEEP = 0,   /* the sums */
    INSTEP_GRADIENTS_ZERO = 1,   /* +0: the next pass may add to them */
    INSTEP_GRADIENTS_AVERAGE = 2 /* the sums times the step's multiplier */
};

/* The step and the norm share these arguments; the norm reads no state and no parameter. */
typedef struct InstepStepArgs {
    InstepControl* control;
    InstepRecord* records;
    const InstepTile* tiles;
    uint64_t tile_count;
    void* param_base; /* added to each tile's `param`: null, since tiles carry addresses; see control.h */
    void* grads;      /* the first bucket's gradient base, in grad_dtype, at any element's alignment */
    void* master;     /* of `master_kind`, placed like the states; or null */
    void* copy;       /* also gets each parameter that is stepped, in copy_dtype, placed like the states; or null */
    float* ema;       /* moving average of each parameter that is stepped, placed like the states; or null */
    void* states[INSTEP_MAX_STATES];
    float* scales[INSTEP_MAX_STATES]; /* of 8-bit states, one per INSTEP_QUANTUM elements */
    InstepNorms* norms;               /* by record; null unless `part` says that there are two */
    uint64_t seed;                    /* of stochastic rounding */
    uint32_t optimizer;
    uint32_t state_count;
    uint32_t bucket; /* of several that share a launch, the one with the lowest number in their table of tiles */
    uint32_t param_dtype;
    uint32_t grad_dtype;
    uint32_t copy_dtype;
    uint32_t master_kind; /* INSTEP_MASTER_ */
    uint32_t moments;     /* INSTEP_MOMENTS_ */
    uint32_t stochastic;  /* rounding of values that lose bits when stored; a master that loses none stays exact */
    uint32_t gradients;   /* INSTEP_GRADIENTS_ */
    uint32_t local;       /* the bucket is not summed over ranks */
    uint32_t ema_from_sample; /* scalars of moved_average, math.h */
    float ema_weight;
    uint32_t part; /* INSTEP_PART_ */
    uint64_t share; /* consecutive tiles that a block takes, on a GPU: at least 1, and enough that the blocks take all */
} InstepStepArgs;

/* The addresses of the tensors of one segment, which replace those in the arguments. */
typedef struct InstepBases {
    void* param_base;
    void* grads;
    void* master;
    void* copy;
    float* ema;
    void* states[INSTEP_MAX_STATES];
    float* scales[INSTEP_MAX_STATES];
} InstepBases;

/* The values that a host-run Begin leaves for a step. No record has a `tail` or `contributors`, nothing is skipped, and
 * the divisor is known. Parameters of one group have the same record while their counts and multipliers are equal. */
typedef struct InstepGiven {
    float multiplier;         /* as in the control block */
    float average_multiplier;
    InstepRecord records[INSTEP_GIVEN_RECORDS];
    uint8_t record_of[INSTEP_GIVEN_INDICES]; /* by a tile's `record` */
} InstepGiven;

/* The argument of the GPU's step kernels. */
typedef struct InstepStepLaunch {
    InstepStepArgs args;
    InstepGiven given; /* read if `args.records` is null; the host then counts the update */
} InstepStepLaunch;

/* The outcome of a pass, in memory that the host reads while the device writes it. It is a seqlock: the device writes 0
 * to `sequence`, then the rest, then the pass to `sequence`. If a reader finds the same `sequence` before and after,
 * and it is not 0, the values between are of one pass. */
typedef struct InstepStatus {
    uint64_t sequence; /* counts passes from 1 */
    double norm;
    double clip;
    double loss_scale;
    uint32_t decided; /* the norm is of this pass */
    uint32_t skipped;
    uint32_t first_nonfinite_bucket;
    uint32_t reserved[5];
} InstepStatus;

typedef struct InstepPublishArgs {
    const InstepControl* control;
    InstepStatus* ring; /* pass n goes to slot n modulo slot_count */
    uint64_t slot_count;
} InstepPublishArgs;

/* Two runs of gradients of one dtype, whole blocks of INSTEP_QUANTUM elements each, aligned to 16 bytes. */
typedef struct InstepAddArgs {
    const void* from;
    void* to; /* gets the sums, added as f32 and rounded once to the nearest */
    uint64_t count;
    uint32_t dtype;
    uint32_t reserved;
} InstepAddArgs;

/* A run of elements and its copy in another dtype; each element is rounded once to the nearest. The two runs do not
 * overlap. */
typedef struct InstepCastArgs {
    const void* from;
    void* to;
    uint64_t count;
    uint32_t from_dtype;
    uint32_t to_dtype;
} InstepCastArgs;

/* A run of stored elements that is read and written as f32 outside a step. */
typedef struct InstepStored {
    void* values;
    void* second;         /* the remainders of parameters, the scales of 8-bit states; else null */
    uint64_t count;       /* elements, from a multiple of INSTEP_QUANTUM of their parameter on */
    uint32_t format;      /* INSTEP_DTYPE_, or INSTEP_MOMENTS_8BIT */
    uint32_t master_kind; /* of parameters with remainders */
    uint32_t is_signed;   /* of 8-bit states */
    uint32_t reserved;
} InstepStored;

/* The entries of one build of cpu/kernels.cpp; each instruction set has one such table. Every entry runs in the IEEE
 * environment and restores the caller's environment. No entry allocates, blocks or calls back. */
typedef struct InstepKernels {
    uint32_t (*self_test)(void); /* 0, or the number of the property that this build lacks */
    void (*begin)(const InstepBeginArgs* args);
    void (*decide)(const InstepDecideArgs* args);
    /* `bases` is indexed by a tile's `record` if segments are in separate memory, and null otherwise. */
    void (*norm)(const InstepStepArgs* args, const InstepBases* bases, uint64_t first_tile, uint64_t last_tile);
    /* `ahead_bytes` is the distance of the loops' prefetches; 0 means no prefetches. */
    void (*step)(const InstepStepArgs* args, const InstepBases* bases, uint64_t first_tile, uint64_t last_tile,
                 uint64_t ahead_bytes);
    /* Writes the action of the user's own code for each segment that these tiles open. */
    void (*custom)(const InstepStepArgs* args);
    /* Sums elements [first, last) of every rank's buffer, of `dtype`, in rank order. It adds them as f32 and rounds
     * once to the nearest. The sum goes to `to` or, if `to` is null, into every rank's buffer. */
    void (*sum)(void* const* ranks, uint64_t rank_count, uint32_t dtype, uint64_t first, uint64_t last, void* to);
    /* Computes to = from * factor, rounded to a 16-bit dtype, and converts back again. */
    void (*narrow)(const float* from, uint16_t* to, uint32_t dtype, float factor, uint64_t count);
    void (*widen)(const uint16_t* from, float* to, uint32_t dtype, float factor, uint64_t count);
    /* Reads stored values as f32, and stores them again, rounded to the nearest. Decoded values encode to the same
     * bits. */
    void (*decode)(const InstepStored* from, float* to);
    void (*encode)(const float* from, const InstepStored* to);
    /* Reads arrays[0], and reads and writes the other arrays; see ceiling.h. */
    void (*ceiling)(float* const* arrays, uint64_t array_count, float factor, uint64_t first, uint64_t last,
                    uint64_t ahead_bytes);
    uint32_t signed_states[INSTEP_OPTIMIZER_COUNT]; /* by bit, which states of a rule may be negative */
    uint32_t scaled[INSTEP_OPTIMIZER_COUNT]; /* 1: norms of the whole parameter scale its change, so a step is two launches */
} InstepKernels;

#endif
