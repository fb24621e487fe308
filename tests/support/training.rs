//! Carries out a random training, and compares two that must be equal.
//!
//! The public interface drives the steppers, and the recorded list of each run is checked. No function here defines a
//! right result: every property compares two of these runs.

use instep::{
    Clip, DType, Divisor, Error, Layout, LayoutBuilder, Master, OffloadPolicy, ParamId, Pass, Recording,
    Result, SegmentAction, Stepper, Strategy, Unused, bf16, f16,
};

use crate::support::arbitrary::{MAX_PARAMS, PassPlan, Setup, Training, Treatment};
use crate::support::lent::{Ground, Lent, Random};
use crate::support::{Outcome, Presummed, assert_same_bits, paint, paint_gradient};

/// The gradients that a stepper gets.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Feed {
    Rank(usize),
    /// The sum over all ranks, for [`Solo`].
    Sums,
}

/// The parameters that an abandoned pass left stepped, for each pass; none for a finished pass.
pub(crate) type Kept = Vec<Option<Vec<bool>>>;

pub(crate) struct Trained {
    outcome: Outcome,
    /// The statuses that were read after finished passes: skipped, clip, norm, whether any bucket was not finite.
    statuses: Vec<(bool, u64, Option<u64>, bool)>,
    pub kept: Kept,
    /// Whether the training ended in a pass for which no rank had data.
    joined: bool,
    /// Whether each parameter is frozen at the end.
    frozen: Vec<bool>,
}

impl Trained {
    pub(crate) fn assert_same(&self, other: &Trained, what: &str) {
        self.outcome.assert_same(&other.outcome, what);
        assert_eq!(self.statuses, other.statuses, "{what}");
        // An abandoned pass says nothing of the gradients that it leaves, and the pass that ends joining leaves zeros.
        if self.joined || other.joined || self.kept.last().is_some_and(Option::is_some) {
            return;
        }
        for (param, (a, b)) in self.outcome.grads.iter().zip(&other.outcome.grads).enumerate() {
            // A frozen one takes part in the all-reduce if its bucket does, which depends on the cap.
            if !self.frozen[param] {
                assert_same_bits(a, b, &format!("gradient of p{param}: {what}"));
            }
        }
    }
}

impl Training {
    fn treatment(&self, at: usize, rank: usize, param: usize) -> Treatment {
        let pass = &self.passes[at];
        let turn = if pass.ranks_differ { rank * 5 } else { 0 };
        let drawn = pass.treatments[(param + turn) % MAX_PARAMS];
        let has_gradient = self.has_data(at, rank) && !self.is_frozen(at, param);
        if drawn.has_gradient() && !has_gradient { Treatment::Read } else { drawn }
    }

    /// Returns whether a parameter is frozen in a pass: an odd number of toggles so far.
    fn is_frozen(&self, at: usize, param: usize) -> bool {
        let toggles = self.passes[..=at].iter().flat_map(|pass| &pass.toggles);
        toggles.filter(|toggle| *toggle % self.params.len() == param).count() % 2 == 1
    }

    fn fed_treatment(&self, at: usize, feed: Feed, param: usize) -> Treatment {
        let of = |rank| self.treatment(at, rank, param);
        match feed {
            Feed::Rank(rank) => of(rank),
            // What any rank has a gradient for has a sum.
            Feed::Sums => {
                (0..self.world_size as usize).map(of).find(|t| t.has_gradient()).unwrap_or_else(|| of(0))
            }
        }
    }

    fn paint_rank(&self, at: usize, rank: usize, param: usize, gradient: &mut [f32]) {
        let pass = &self.passes[at];
        for (element, g) in gradient.iter_mut().enumerate() {
            *g = paint_gradient(at + 8 * rank, param, element) * pass.scale;
        }
        for special in &pass.specials {
            let hit =
                special.param % self.params.len() == param && special.rank % self.world_size as usize == rank;
            if hit && !gradient.is_empty() {
                gradient[special.element % gradient.len()] = special.value;
            }
        }
    }

    fn paint(&self, at: usize, feed: Feed, param: usize, gradient: &mut [f32]) {
        if let Feed::Rank(rank) = feed {
            return self.paint_rank(at, rank, param, gradient);
        }
        let (mut addend, mut of_group) = (vec![0.0f32; gradient.len()], vec![0.0; gradient.len()]);
        // Not from zero: 0.0 + -0.0 would lose the sign.
        let add = |sums: &mut [f32], addend: &[f32], is_first| {
            let sum = |sum: f32, x: f32| if is_first { x } else { sum + x };
            sums.iter_mut().zip(addend).for_each(|(total, x)| *total = sum(*total, *x));
        };
        for rank in 0..self.world_size as usize {
            addend.fill(0.0);
            if self.treatment(at, rank, param).has_gradient() {
                self.paint_rank(at, rank, param, &mut addend);
            }
            add(&mut of_group, &addend, rank.is_multiple_of(self.summed_by));
            if (rank + 1).is_multiple_of(self.summed_by) {
                add(gradient, &of_group, rank < self.summed_by);
            }
        }
        gradient.iter_mut().filter(|sum| sum.is_nan()).for_each(|sum| *sum = f32::from_bits(0x7fff_ffff));
    }

    /// Trains a single rank that gets the sums. With `kept`, abandoned passes are replaced by their results.
    pub(crate) fn run_alone(&self, setup: &Setup, kept: Option<&Kept>) -> Result<Trained> {
        self.run(setup, Presummed(self.world_size), Feed::Sums, kept)
    }

    pub(crate) fn run(
        &self,
        setup: &Setup,
        comm: impl instep::Collective + 'static,
        feed: Feed,
        kept: Option<&Kept>,
    ) -> Result<Trained> {
        let named = self.params.iter().enumerate();
        let add = |builder: LayoutBuilder,
                   (k, (len, uses, action)): (usize, &(usize, u32, SegmentAction))| {
            builder.param(format!("p{k}"), *len).uses(*uses).action(*action)
        };
        let layout = named.fold(Layout::builder(), add).build()?;
        let mut random =
            setup.lent.filter(|_| self.data.is_none() && setup.is_plainly_replicated()).map(Random);
        let lent = { &mut random }.as_mut();
        let mut lent = lent.map(|random| Lent::new(Ground::Host, &layout, self.precision, random));
        let mut builder = self.optim.builder(&layout).mode(setup.mode(self));
        builder = match lent {
            // What no rank uses is named.
            Some(_) => builder.unused(Unused::StepZero),
            None => builder.unused(self.unused).bucket_cap_bytes(setup.cap),
        };
        builder = builder.loss_scale(self.loss_scale).isa(setup.isa).record(true);
        builder = builder.skip_nonfinite(self.skip_nonfinite).precision(self.precision);
        if let Some(max_norm) = self.max_norm {
            builder = builder.clip(Clip::Global(max_norm));
        }
        if let Some(threads) = setup.threads {
            builder = builder.threads(threads);
        }
        if self.data.is_some() {
            builder = builder.uneven_inputs(Divisor::WorldSize);
        }
        builder = builder.strategy(setup.strategy);
        if let Some(ranks) = setup.shard_size {
            builder = builder.shard_size(ranks);
        }
        if setup.offloads {
            builder = builder.offload(OffloadPolicy::default());
        }
        let mut stepper = match &lent {
            // SAFETY: `lent` is kept until the stepper is closed; it frees only what a rebind has let go of.
            Some(lent) => unsafe { builder.host_borrowing(comm, lent.lend())? },
            None => builder.host(comm)?,
        };
        let outcome = Outcome::of(&stepper)?;
        let mut trained = Trained { outcome, statuses: vec![], kept: vec![], joined: false, frozen: vec![] };
        let mut recorded = Recording::default();
        for at in 0..self.passes.len() {
            if let (Some(lent), Some(random)) = (&mut lent, &mut random) {
                recorded.list.extend(stepper.take_recording().unwrap().list);
                assert_eq!(stepper.check(&recorded), [], "{setup:?}");
                if lent.move_some(&mut stepper, random)? {
                    // A list begins anew with buckets that are cut anew.
                    recorded = Recording::default();
                }
            }
            self.run_pass(setup, &mut stepper, feed, at, kept, &mut trained)?;
            let rebuilds =
                setup.rebuilds >> (at % 8) & 1 == 1 && lent.is_none() && setup.is_plainly_replicated();
            if rebuilds {
                recorded.list.extend(stepper.take_recording().unwrap().list);
                assert_eq!(stepper.check(&recorded), [], "{setup:?}");
                if stepper.rebuild_buckets()? {
                    recorded = Recording::default();
                }
            }
        }
        if self.data.is_some() && matches!(feed, Feed::Rank(_)) {
            assert!(!stepper.join()?, "no rank has data for another pass");
            trained.joined = true;
        }
        trained.outcome = Outcome::of(&stepper)?;
        trained.frozen = layout.ids().map(|id| stepper.is_frozen(id)).collect::<Result<_>>()?;
        recorded.list.extend(stepper.take_recording().unwrap().list);
        assert_eq!(stepper.check(&recorded), [], "{setup:?}");
        stepper.close()?;
        { &lent }.iter().for_each(Lent::assert_bands_stand);
        Ok(trained)
    }

    fn run_pass(
        &self,
        setup: &Setup,
        stepper: &mut Stepper,
        feed: Feed,
        at: usize,
        kept: Option<&Kept>,
        trained: &mut Trained,
    ) -> Result<()> {
        let plan = &self.passes[at];
        if plan.reload || at == 0 {
            // Ranks differ until the pass has begun; all of them take rank 0's.
            // Masters and parameters that are kept in shards are never sent: every rank writes the same.
            let differs = match setup.strategy {
                Strategy::Replicated if !setup.offloads => true,
                Strategy::Replicated | Strategy::Zero => self.precision.master == Master::None,
                Strategy::Fsdp => false,
            };
            let offset = if let (Feed::Rank(rank), true) = (feed, differs) { rank as f32 } else { 0.0 };
            let ids: Vec<_> = stepper.layout().clone().ids().collect();
            for (param, id) in ids.into_iter().enumerate() {
                let values = (0..self.params[param].0).map(|k| paint(at * 31 + param, k) + offset);
                stepper.write(id, &values.collect::<Vec<f32>>())?;
            }
        }
        for param in plan.toggles.iter().map(|toggle| toggle % self.params.len()) {
            let id = stepper.layout().ids().nth(param).unwrap();
            stepper.set_frozen(id, !stepper.is_frozen(id)?)?;
        }
        let abandon = plan.abandon.filter(|_| kept.is_none());
        let replaced = kept.and_then(|kept| kept[at].as_ref());
        if replaced.is_some_and(|kept| kept.iter().all(|kept| !kept)) {
            return Ok(());
        }
        let treatment = |param: usize| match replaced {
            Some(kept) if !kept[param] || self.is_frozen(at, param) => Treatment::Untouched,
            Some(_) => Treatment::Used,
            None => self.fed_treatment(at, feed, param),
        };
        let ids: Vec<_> = stepper.layout().clone().ids().collect();
        if let Feed::Rank(rank) = feed
            && !self.has_data(at, rank)
        {
            assert!(stepper.join()?, "rank 0 has data");
            trained.kept.push(None);
            return self.read_status(plan, stepper, trained);
        }
        let is_lent = stepper.plan().is_foreign();
        let is_unused = |param: usize| {
            let is_used = self.fed_treatment(at, Feed::Sums, param).has_gradient();
            is_lent && self.unused == Unused::Skip && !is_used && !self.is_frozen(at, param)
        };
        let mut pass = stepper.begin()?;
        let named: Vec<_> =
            (0..ids.len()).filter(|param| is_unused(*param)).map(|param| ids[param]).collect();
        if !named.is_empty() {
            pass.set_unused(&named)?;
        }
        // A master that is kept in shards cannot be read by one rank; the parameter that was made of it can.
        let read = |pass: &Pass<'_>, param: usize| match (
            setup.strategy != Strategy::Replicated && self.precision.master != Master::None,
            self.precision.param,
        ) {
            (false, _) => pass.read(ids[param], &mut vec![0.0; self.params[param].0]),
            (_, DType::BF16) => pass.view::<bf16>(ids[param]).map(drop),
            _ => pass.view::<f16>(ids[param]).map(drop),
        };
        for param in 0..ids.len() {
            // All ranks unshard the same buckets, also those that they do not read.
            let bucket = pass.plan().segment_of(param).bucket;
            pass.unshard(bucket)?;
            if treatment(param) != Treatment::Untouched {
                read(&pass, param)?;
            }
            if setup.order[param].is_multiple_of(3) {
                pass.reshard(bucket)?;
            }
        }
        let turn = if let Feed::Rank(rank) = feed { rank * 7 } else { 0 };
        let order = (0..MAX_PARAMS).map(|k| plan.order[setup.order[(k + turn) % MAX_PARAMS]]);
        let used = order.filter(|param| *param < ids.len() && treatment(*param).has_gradient());
        let frozen: Vec<usize> = (0..ids.len()).filter(|param| self.is_frozen(at, *param)).collect();
        let asks = |param: usize| {
            let (len, _, action) = self.params[param];
            len > 0 && action != SegmentAction::Leave && treatment(param).has_gradient()
        };
        if is_lent && abandon.is_none() && !(0..ids.len()).any(asks) {
            // Borrowed buckets of which nothing was asked for would be refused.
            let zeroed = |param: &usize| {
                !frozen.contains(param) && !is_unused(*param) && !treatment(*param).has_gradient()
            };
            (0..ids.len())
                .filter(zeroed)
                .try_for_each(|param| pass.write(ids[param].grad(), &vec![0.0; self.params[param].0]))?;
        }
        for param in used.take(abandon.unwrap_or(usize::MAX)) {
            let times = self.params[param].1 - u32::from(treatment(param) == Treatment::Late);
            self.hand_over(&mut pass, at, feed, param, ids[param], times)?;
            // Its bucket may have launched.
            if let Some(frozen) = frozen.get(param) {
                match read(&pass, *frozen) {
                    // Its bucket has launched, or was resharded above.
                    Err(Error::Order(refusal)) if setup.strategy == Strategy::Fsdp => {
                        assert!(refusal.wrong.contains("not unsharded"), "{refusal}");
                    }
                    outcome => outcome?,
                }
            }
        }
        if abandon.is_some() {
            let buckets = pass.abandon()?.stepped_buckets;
            let in_bucket = |param| buckets.contains(&stepper.plan().segment_of(param).bucket);
            let stepped = |param| in_bucket(param) && !is_unused(param);
            trained.kept.push(Some((0..ids.len()).map(stepped).collect()));
        } else {
            match feed {
                Feed::Rank(_) => pass.finish()?,
                Feed::Sums => crate::support::finish(pass)?,
            }
            trained.kept.push(None);
        }
        self.read_status(plan, stepper, trained)
    }

    fn read_status(&self, plan: &PassPlan, stepper: &Stepper, trained: &mut Trained) -> Result<()> {
        if plan.status {
            let status = stepper.status()?;
            if plan.abandon.is_none() {
                let norm = status.norm.filter(|_| self.wants_norm()).map(f64::to_bits);
                // Which bucket it is depends on the cap, that there is one does not.
                let nonfinite = status.first_nonfinite_bucket.is_some();
                trained.statuses.push((status.skipped, status.clip.to_bits(), norm, nonfinite));
            }
        }
        Ok(())
    }

    fn hand_over(
        &self,
        pass: &mut Pass<'_>,
        at: usize,
        feed: Feed,
        param: usize,
        id: ParamId,
        times: u32,
    ) -> Result<()> {
        self.paint(at, feed, param, pass.grads().get_mut(id)?);
        for _ in 0..times {
            // Between two uses the gradient is still the trainer's.
            pass.grads().get_mut(id)?;
            pass.grad_ready(id)?;
        }
        Ok(())
    }
}
