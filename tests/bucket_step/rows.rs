//! Shards of whole rows have the bits of the whole parameter, in 8 bits and with stochastic rounding.
//!
//! The whole parameter is compared with one parameter per row, each at a multiple of 256 elements.

use std::ffi::c_void;
use std::ops::Range;

use instep::bucket_step::{Lent, StepTensors};
use instep::cuda::Cuda;
use instep::layout::ForeignBucket;
use instep::{
    BucketStep, DType, Isa, Layout, Master, Moments, ParamId, Pool, Precision, Rounding, Scaling, Solo,
    Stepper,
};

use crate::support::lent::{Ground, Tensor, stream};
use crate::support::stored::one_per_state_count;
use crate::support::{Optim, paint};

const ROWS: usize = 7;
const STEPS: usize = 4;
/// Number of elements of the parameters before this one.
const FIRST: usize = 1000;

#[derive(Clone, Copy, Debug)]
struct Case {
    precision: Precision,
    optim: Optim,
    row: usize,
}

impl Case {
    fn is_coded(&self) -> bool {
        self.precision.moments == Moments::EightBit
    }

    /// Returns the number of elements between two rows of states.
    fn stride(&self) -> usize {
        if self.is_coded() { self.row.next_multiple_of(256) } else { self.row }
    }

    /// Returns the elements of some rows, as parameters or gradients.
    fn values(&self, of: usize, rows: &Range<usize>) -> Vec<u8> {
        let values = (rows.start * self.row..rows.end * self.row).map(|k| paint(of, k));
        match self.precision.param {
            DType::F32 => values.flat_map(f32::to_ne_bytes).collect(),
            _ => values.flat_map(|value| half::bf16::from_f32(value).to_ne_bytes()).collect(),
        }
    }

    /// Trains some rows as one parameter, or as one parameter each, and returns all bytes: parameters, masters, codes
    /// and scales.
    fn trained(&self, rows: Range<usize>, each: bool, on: Option<&Cuda>, isa: Isa) -> Vec<Vec<u8>> {
        let pieces = if each { rows.len() } else { 1 };
        let rows_each = rows.len() / pieces;
        let layout = (0..pieces)
            .fold(Layout::builder(), |layout, k| layout.param(format!("{k}"), rows_each * self.row));
        let layout = layout.build().unwrap();
        let place = rows.len() * self.stride();
        let listed = |bucket: ForeignBucket, (k, id): (usize, ParamId)| {
            let first = FIRST + (rows.start + k * rows_each) * self.row;
            bucket.gradient(id, k * rows_each * self.stride()).rows(id, self.row, first as u64)
        };
        let bucket = layout.ids().enumerate().fold(ForeignBucket::new(place), listed);
        let builder =
            BucketStep::builder(&layout, self.optim.boxed()).bucket(bucket).precision(self.precision);
        let ground = on.map_or(Ground::Host, Ground::of);
        let bytes = self.precision.param.bytes() as usize;
        let made = |values: &[u8]| {
            let tensor = Tensor::new(&ground, values.len(), 0);
            tensor.write(values);
            tensor
        };
        let zeros = |bytes: usize| made(&vec![0; bytes]);
        let params = made(&self.values(99, &rows));
        let master = (self.precision.master != Master::None).then(|| zeros(place * 2));
        let states = self.optim.boxed().state_names().len();
        let of_states = |bytes: usize| (0..states).map(|_| zeros(bytes)).collect::<Vec<_>>();
        let scales = if self.is_coded() { of_states(place / 256 * 4) } else { Vec::new() };
        let states = of_states(place * if self.is_coded() { 1 } else { 4 });
        let apart = |tensor: &Tensor| -> Vec<*mut c_void> {
            (0..pieces)
                .map(|k| tensor.address().wrapping_add(k * rows_each * self.row * bytes).cast())
                .collect()
        };
        let mut host =
            on.is_none().then(|| builder.clone().isa(isa).pool(Pool::new(2).unwrap()).host().unwrap());
        let mut gpu = on.map(|cuda| builder.cuda(cuda).unwrap());
        for step in 0..STEPS {
            let grads = made(&self.values(step, &rows));
            let (params, grads) = (apart(&params), apart(&grads));
            // SAFETY: this test's own memory, on one stream.
            unsafe {
                let at = |tensor: &Tensor| Lent::at(tensor.address().cast());
                let tensors = StepTensors::new(Lent::at_each(&params), Lent::at_each(&grads));
                let tensors = match &master {
                    Some(master) => tensors.master(at(master)),
                    None => tensors,
                };
                let tensors = tensors.states(states.iter().map(at)).scales(scales.iter().map(at));
                match (&mut host, &mut gpu) {
                    (Some(host), _) => host.step(&tensors, Scaling::mean(2)).unwrap(),
                    (_, Some(gpu)) => gpu.enqueue(&tensors, Scaling::mean(2), stream()).unwrap(),
                    _ => unreachable!(),
                }
            }
        }
        let all = [&params].into_iter().chain(&master).chain(&states).chain(&scales);
        all.inspect(|tensor| tensor.assert_bands_stand()).map(Tensor::read).collect()
    }
}

fn cases() -> Vec<Case> {
    let rounding = Rounding::Stochastic { seed: 7 };
    let coded = Precision { moments: Moments::EightBit, ..Precision::F32 };
    let narrow = Precision { param: DType::BF16, grad: DType::BF16, ..coded };
    let precisions = [
        coded,
        Precision { rounding, ..coded },
        Precision { rounding, ..narrow },
        Precision { master: Master::Remainder16, ..narrow },
        Precision { moments: Moments::F32, rounding, ..narrow },
    ];
    let optims = one_per_state_count();
    let rows = [130, 256, 300, 896, 2049, 4352];
    let all = rows.iter().enumerate().flat_map(|(at, row)| {
        precisions.iter().enumerate().map(move |(k, precision)| Case {
            precision: *precision,
            optim: optims[1 + (at + k) % 3],
            row: *row,
        })
    });
    all.collect()
}

fn concatenated(parts: &[Vec<Vec<u8>>]) -> Vec<Vec<u8>> {
    (0..parts[0].len()).map(|kind| parts.iter().flat_map(|part| part[kind].clone()).collect()).collect()
}

#[test]
fn shards_cut_between_rows_have_the_bits_of_the_whole_and_of_its_rows() {
    for case in cases() {
        for isa in Isa::available() {
            let whole = case.trained(0..ROWS, false, None, isa);
            assert!(case.trained(0..ROWS, true, None, isa) == whole, "{case:?} {isa:?}: row by row");
            for cuts in [&[0, 3, 7][..], &[0, 1, 2, 7], &[0, 2, 4, 6, 7]] {
                let parts: Vec<_> =
                    cuts.windows(2).map(|cut| case.trained(cut[0]..cut[1], false, None, isa)).collect();
                assert!(concatenated(&parts) == whole, "{case:?} {isa:?}: {cuts:?}");
            }
        }
    }
}

#[cfg(not(kernels_only))]
#[test]
fn a_gpu_steps_shards_that_are_cut_between_rows_with_the_cpus_bits() {
    let cuda = crate::support::device::cuda();
    for case in cases().into_iter().filter(|case| case.row < 2000) {
        let expected = case.trained(2..5, false, None, Isa::Baseline);
        assert!(case.trained(2..5, false, Some(&cuda), Isa::Baseline) == expected, "{case:?}");
    }
}

#[test]
fn rows_that_do_not_fit_are_refused_by_name() {
    let layout = Layout::builder().param("a", 600).param("b", 600).build().unwrap();
    let [a, b] = ["a", "b"].map(|name| layout.id(name).unwrap());
    let coded = Precision { moments: Moments::EightBit, ..Precision::F32 };
    let refusal = |precision, rows: &dyn Fn(ForeignBucket) -> ForeignBucket| {
        let bucket = rows(ForeignBucket::new(2048).gradient(a, 0).gradient(b, 1024));
        let built = BucketStep::builder(&layout, Optim::of(instep::Sgd::default()).boxed());
        built.bucket(bucket).precision(precision).host().err().map(|error| error.to_string())
    };
    assert_eq!(refusal(coded, &|bucket| bucket.rows(a, 300, 0).rows(b, 600, 600)), None);
    for (rows, first, expected) in [
        (7, 0, "rows of `a`: 600 elements are no whole rows of 7"),
        (0, 0, "rows of `a`: 600 elements are no whole rows of 0"),
        (100, 0, "rows of `a`: states of rows of 100 end at element 1536, after 1024"),
        (300, u64::MAX, "rows of `a`: begin at element"),
    ] {
        let found = refusal(coded, &|bucket| bucket.rows(a, rows, first));
        assert!(found.as_ref().is_some_and(|text| text.contains(expected)), "{rows} {first}: {found:?}");
    }
    // States of floats have no blocks, so rows leave no gaps.
    assert_eq!(
        refusal(Precision::F32, &|_| ForeignBucket::new(1200)
            .gradient(a, 0)
            .gradient(b, 600)
            .rows(a, 200, 0)),
        None
    );
}

#[test]
fn a_stepper_refuses_rows_since_its_own_shards_need_none() {
    let layout = Layout::builder().param("a", 600).build().unwrap();
    let a = layout.id("a").unwrap();
    let (mut params, mut grads) = ([0f32; 600], [0f32; 600]);
    let bucket = ForeignBucket::new(600).gradient(a, 0).rows(a, 300, 0);
    let memory = instep::Borrowed::new().param(a, params.as_mut_ptr()).bucket(bucket, grads.as_mut_ptr());
    let builder = Stepper::builder(&layout, instep::Sgd::default());
    // SAFETY: refused, so nothing is touched.
    let refused = unsafe { builder.host_borrowing(Solo::default(), memory) }.err().unwrap().to_string();
    assert!(refused.contains("rows of bucket 0"), "{refused}");
}
