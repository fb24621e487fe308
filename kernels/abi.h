/* This file defines every struct that crosses between Rust, C++ and CUDA, and nothing else.
 *
 * The file is C99, so that bindgen, a C compiler, g++ and nvcc read the same text. `cargo run -p bindings` generates
 * src/abi.rs and abi_layout.h from it. With abi_layout.h each compiler checks that its layout equals the layout in
 * Rust. Members have fixed widths, and there is no implicit padding. */
#ifndef INSTEP_ABI_H
#define INSTEP_ABI_H

#include <stdint.h>

/* Norm leaves, blocks of 8-bit states, shards and segments begin at multiples of this many elements of a parameter. No
 * split of the work can therefore move the start of a leaf or block. */
#define INSTEP_QUANTUM 256
/* Number of elements of a full tile. Thread blocks and pool tasks take whole tiles. */
#define INSTEP_TILE_ELEMENTS 2048
/* Largest number of tiles that a kernel may take as one run. An element's index in a run is then below 2^31. */
#define INSTEP_LONGEST_RUN 524288
/* Number of threads per block of every GPU kernel. */
#define INSTEP_GPU_THREADS 256
/* 22 limbs of 32 bits hold any sum of 2^32 leaf sums exactly; see norm.h. */
#define INSTEP_NORM_LIMBS 22
/* Largest number of optimizer states per parameter. */
#define INSTEP_MAX_STATES 3
/* Lengths of the two arrays of InstepGiven: different records, and indices of records. With the rest of
 * InstepStepLaunch, the two arrays fill the 4,096 bytes of arguments that every driver accepts. */
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

/* The formats of stored elements. Element arithmetic is f32 throughout. */
enum InstepDtype { INSTEP_DTYPE_F32 = 0, INSTEP_DTYPE_BF16 = 1, INSTEP_DTYPE_F16 = 2 };

/* The kinds of master weights of a 16-bit parameter. Masters have the offsets of the states; see remainder.h. */
enum InstepMaster {
    INSTEP_MASTER_NONE = 0,
    INSTEP_MASTER_F32 = 1,
    INSTEP_MASTER_REMAINDER16 = 2, /* 16 bits that extend the bf16 parameter to an f32 */
    INSTEP_MASTER_REMAINDER8 = 3   /* 8 bits that extend it to a 24-bit master */
};

/* The formats of stored states: a dtype, or 8-bit codes (codes.h). */
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

/* Hyperparameters as the user gave them, in f64. Begin derives the scalars of each record from them once per pass. */
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

/* The arguments of the user's own code. Begin writes `lr` and `step`. The launch before that code writes the others. */
typedef struct InstepCustomScalars {
    double lr;
    uint64_t step;     /* number of this update, from 1 */
    float multiplier;  /* factor of the summed gradient */
    uint32_t action;   /* INSTEP_ACTION_STEP, or INSTEP_ACTION_LEAVE: the code must change nothing */
} InstepCustomScalars;

/* The scalars that Begin derives for one update: `custom`, or the struct in the rule's header. Only the kernels read
 * that struct. */
typedef union InstepScalars {
    InstepCustomScalars custom;
    uint64_t words[6];
} InstepScalars;

/* A record in control memory. Each segment has one for each optimizer that steps it. `steps` counts the updates of
 * earlier passes. `stepped` is 1 if the last pass made an update, and the next Begin adds it to `steps`. A skipped or
 * abandoned pass therefore never advances bias correction. */
typedef struct InstepRecord {
    uint64_t steps;
    uint32_t stepped;
    uint32_t hyper;     /* index of the record's hyperparameters */
    uint32_t action;
    uint16_t optimizer;  /* INSTEP_OPTIMIZER_ */
    uint16_t grad_dtype; /* of the bucket's gradients and of the counts that follow them */
    uint64_t tail; /* address of the segment's count in the tail block, or 0. The sum over ranks makes the count the
                    * number of ranks with a gradient. If this number is 0, the step does not change the segment. */
    uint64_t contributors; /* address of the bucket's count of ranks that had data in this pass, or 0 */
    double carried[2]; /* a number that the rule carries from update to update (NAdam's product of momenta): its value
                        * now, and after this pass's update. It is 1 before the first update and in all other rules. */
    InstepScalars scalars;
} InstepRecord;

/* Two sums of squares over a whole parameter: of the parameter before the update, and of the change. A rule such as
 * LAMB scales the change by the roots of these sums. */
typedef struct InstepNorms {
    uint64_t limbs[2][INSTEP_NORM_LIMBS]; /* exact sums; see norm.h */
    uint32_t nonfinite[2]; /* 1 if a magnitude is infinite or NaN, else 0. The sum over ranks counts such ranks. */
} InstepNorms;

/* Values that change from pass to pass and are decided on the device. */
typedef struct InstepControl {
    float next_loss_scale;             /* if dynamic. Only Decide writes it, so the trainer may read it during steps. */
    uint32_t growth_tracker;           /* passes without a skip since the scale changed. Only Decide writes it. */
    uint64_t limbs[INSTEP_NORM_LIMBS]; /* exact sum of squares of the reduced gradients */
    uint64_t passes;                   /* number of passes begun, including this one */
    double norm;                       /* of the averaged gradients, after Decide */
    double previous_norm;              /* last finite norm, by which the next pass may clip; negative: none yet */
    double clip;                       /* coefficient from Begin or Decide; 1 without clipping and in a skipped pass */
    double max_norm;                   /* limit of a further clip set, constant; negative: the set is not clipped */
    double divisor;                    /* number of ranks of the mean; 0: the number of ranks that contributed */
    double loss_scale;                 /* factor of this pass's loss, by which the multipliers divide */
    float multiplier;                  /* factor of each stepped gradient, if the divisor is known */
    float average_multiplier;          /* factor of gradients that are only averaged: 1/divisor, if known */
    float local_multiplier;            /* factor of gradients that are not summed over ranks: 1/loss_scale */
    uint32_t reserved;
    uint32_t max_abs_bits;             /* bits of the largest |gradient|; bits above infinity's mean NaN */
    uint32_t first_nonfinite_bucket;   /* INSTEP_NO_BUCKET if none */
    uint32_t skip;                     /* the pass must change no parameter */
    uint32_t decided;                  /* 1 after Decide, which writes norm, clip and skip */
} InstepControl;

/* Consecutive elements of one segment, with their place in every tensor. A tile has 64 bytes. */
typedef struct InstepTile {
    uint64_t param;        /* place of its first element, in bytes from param_base */
    uint64_t grad_offset;  /* elements from the launch's gradient base */
    uint64_t state_offset; /* elements from each state's base */
    uint64_t element;      /* number of its first element in the layout, in registration order; for random.h */
    uint32_t count;
    uint32_t record;
    uint32_t first; /* 1 for the segment's first tile, which also writes the record's `stepped` flag */
    uint32_t first_record; /* record of the segment's first optimizer; its `steps` counts the parameter's updates */
    uint32_t run;          /* of a full tile: number of full tiles, from this one on, that are adjacent in every
                            * tensor; at most INSTEP_LONGEST_RUN. Of a partial tile: 1. */
    uint32_t bucket;       /* number of its bucket, counted from `bucket` of InstepStepArgs */
    uint32_t reserved[2];
} InstepTile;

typedef struct InstepBeginArgs {
    InstepControl* control;
    InstepRecord* records;
    InstepHyper* hypers;
    double* lr_multipliers; /* one per record */
    uint32_t* actions;      /* one action per record, as the trainer last set them */
    uint64_t record_count;
    InstepNorms* norms;     /* one per record, which Begin sets to zero; or null */
    const uint32_t* ring; /* slots of settings that the host writes ahead for a GPU. Begin copies slot `passes` modulo
                           * `slot_count` to `hypers` and the arrays after it. Null: the settings are there already. */
    uint64_t slot_words;
    uint64_t slot_count;
    double divisor;
    double loss_scale;        /* 0: the control block has it */
    double previous_max_norm; /* limit for a clip by the previous pass's norm; negative: no clipping */
    double clip;              /* a clip coefficient that the caller knows; 1: no clipping */
    const float* grad_scale;  /* another program's loss scale, which replaces `loss_scale`; or null */
    const float* found_inf;   /* that program's flag: if it is not 0, the pass changes nothing; or null */
    InstepControl* further_controls; /* blocks of single buckets or further clip sets; treated like `control` */
    uint64_t further_count;
} InstepBeginArgs;

typedef struct InstepDecideArgs {
    InstepControl* control;
    const void* contributors;  /* any bucket's count of ranks that had data, in grad_dtype, or null */
    double max_norm;           /* of `control`; negative: no clipping */
    double growth_factor;      /* factor of a dynamic loss scale after `growth_interval` passes without a skip */
    double backoff_factor;     /* factor of a dynamic loss scale after a skipped pass */
    double largest_loss_scale; /* largest loss scale for which the gradients' factor is a normal f32 */
    uint32_t skip_nonfinite;
    uint32_t growth_interval;    /* 0: the loss scale is constant */
    InstepControl* pass_control; /* the pass's block, if `control` belongs to one bucket; else null */
    uint32_t bucket;             /* number of that bucket */
    uint32_t grad_dtype;
    float* found_inf; /* flag of another program's loss scaler, or null. If the flag is not 0, the pass changes nothing.
                       * After deciding, Decide sets the flag to 1 if the pass changes nothing, and else to 0. */
    InstepControl* set_controls; /* blocks of the further clip sets. Each has its own norm; all share one decision to skip. */
    uint64_t set_count;
} InstepDecideArgs;

/* A rule that is scaled by norms of the whole parameter needs two launches, one after the other. */
enum InstepStepPart {
    INSTEP_PART_WHOLE = 0,
    INSTEP_PART_MEASURE = 1, /* updates the states and adds to the norms; parameters do not change */
    INSTEP_PART_APPLY = 2,   /* reads the states and updates the parameters */
    INSTEP_PART_END = 3      /* steps nothing; zeroes or averages the gradients that the user's own code has used */
};

/* The values that a launch leaves in the gradients of segments with INSTEP_ACTION_STEP, also in a skipped pass. */
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
    void* param_base; /* added to each tile's `param`; null if `param` is an address; see control.h */
    void* grads;      /* first bucket's gradients, in grad_dtype, aligned to one element or more */
    void* master;     /* of `master_kind`, with the offsets of the states; or null */
    void* copy;       /* of each stepped parameter, in copy_dtype, with the offsets of the states; or null */
    float* ema;       /* moving average of each stepped parameter, with the offsets of the states; or null */
    void* states[INSTEP_MAX_STATES];
    float* scales[INSTEP_MAX_STATES]; /* of 8-bit states, one per INSTEP_QUANTUM elements */
    InstepNorms* norms;               /* one per record; null if `part` is INSTEP_PART_WHOLE */
    uint64_t seed;                    /* of stochastic rounding */
    uint32_t optimizer;
    uint32_t state_count;
    uint32_t bucket; /* lowest number among the buckets with tiles in `tiles` */
    uint32_t param_dtype;
    uint32_t grad_dtype;
    uint32_t copy_dtype;
    uint32_t master_kind; /* INSTEP_MASTER_ */
    uint32_t moments;     /* INSTEP_MOMENTS_ */
    uint32_t stochastic;  /* 1: values that lose bits when stored are rounded stochastically */
    uint32_t gradients;   /* INSTEP_GRADIENTS_ */
    uint32_t local;       /* 1: the bucket is not summed over ranks */
    uint32_t ema_from_sample; /* scalars of moved_average, math.h */
    float ema_weight;
    uint32_t part; /* INSTEP_PART_ */
    uint64_t share; /* on a GPU: consecutive tiles per block, at least 1. The blocks together take all tiles. */
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

/* The results of a Begin that ran on the host. No record has a `tail` or `contributors`, nothing is skipped, and the
 * divisor is known. Parameters of one group share a record while their step counts and multipliers are equal. */
typedef struct InstepGiven {
    float multiplier;         /* as in the control block */
    float average_multiplier;
    InstepRecord records[INSTEP_GIVEN_RECORDS];
    uint8_t record_of[INSTEP_GIVEN_INDICES]; /* index into `records`, for each `record` of a tile */
} InstepGiven;

/* The argument of the GPU's step kernels. */
typedef struct InstepStepLaunch {
    InstepStepArgs args;
    InstepGiven given; /* read if `args.records` is null; the host then counts the updates */
} InstepStepLaunch;

/* The outcome of a pass, in memory that the host reads while the device writes it. It is a seqlock: the device writes 0
 * to `sequence`, then the other members, then the number of the pass to `sequence`. A reader reads `sequence` before
 * and after the others. If both values are equal and not 0, the members are of one pass. */
typedef struct InstepStatus {
    uint64_t sequence; /* number of the pass, from 1 */
    double norm;
    double clip;
    double loss_scale;
    uint32_t decided; /* 1 if `norm` is of this pass */
    uint32_t skipped;
    uint32_t first_nonfinite_bucket;
    uint32_t reserved[5];
} InstepStatus;

typedef struct InstepPublishArgs {
    const InstepControl* control;
    InstepStatus* ring; /* pass n goes to slot n modulo slot_count */
    uint64_t slot_count;
} InstepPublishArgs;

/* Two runs of gradients of one dtype. Each has whole blocks of INSTEP_QUANTUM elements and is aligned to 16 bytes. */
typedef struct InstepAddArgs {
    const void* from;
    void* to; /* gets the sums, added as f32 and rounded once to the nearest */
    uint64_t count;
    uint32_t dtype;
    uint32_t reserved;
} InstepAddArgs;

/* A run of elements and its copy in another dtype. Each element is rounded once to the nearest. The two runs do not
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
    void* second;         /* the remainders of parameters, or the scales of 8-bit states; else null */
    uint64_t count;       /* elements; the number of the first one in its parameter is a multiple of INSTEP_QUANTUM */
    uint32_t format;      /* INSTEP_DTYPE_, or INSTEP_MOMENTS_8BIT */
    uint32_t master_kind; /* of parameters with remainders */
    uint32_t is_signed;   /* 1: 8-bit states may be negative */
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
    /* `ahead_bytes` is the distance of the loops' prefetches; 0 means none of lines that a loop does not read yet. */
    void (*step)(const InstepStepArgs* args, const InstepBases* bases, uint64_t first_tile, uint64_t last_tile,
                 uint64_t ahead_bytes);
    /* Writes the action of the user's own code, for each segment with its first tile in the launch. */
    void (*custom)(const InstepStepArgs* args);
    /* Sums elements [first, last) of every rank's buffer, of `dtype`, in rank order. It adds them as f32 and rounds
     * once to the nearest. The sum goes to `to`. If `to` is null, it goes into every rank's buffer. */
    void (*sum)(void* const* ranks, uint64_t rank_count, uint32_t dtype, uint64_t first, uint64_t last, void* to);
    /* `narrow` writes `from` times `factor`, rounded to a 16-bit dtype. `widen` converts `from` and multiplies it. */
    void (*narrow)(const float* from, uint16_t* to, uint32_t dtype, float factor, uint64_t count);
    void (*widen)(const uint16_t* from, float* to, uint32_t dtype, float factor, uint64_t count);
    /* `decode` reads stored values as f32. `encode` stores f32 values, rounded to the nearest. Encoding decoded values
     * again gives the same bits. */
    void (*decode)(const InstepStored* from, float* to);
    void (*encode)(const float* from, const InstepStored* to);
    /* Reads arrays[0], and updates the other arrays in place; see ceiling.h. */
    void (*ceiling)(float* const* arrays, uint64_t array_count, float factor, uint64_t first, uint64_t last,
                    uint64_t ahead_bytes);
    uint32_t signed_states[INSTEP_OPTIMIZER_COUNT]; /* bit k is 1 if state k of the rule may be negative */
    uint32_t scaled[INSTEP_OPTIMIZER_COUNT]; /* 1: the change is scaled by norms of the parameter, in two launches */
} InstepKernels;

#endif
