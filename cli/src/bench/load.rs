//! The share of the machine's CPU time that other processes used while the benches ran.
//!
//! This module reads Linux's `/proc`, where all times are in ticks of the same length. On other systems the load is
//! unknown.

use std::fs;

use serde::Serialize;

/// The figures of a run are unreliable if other processes and virtual machines used more than this percentage of all
/// cores' time. On an idle machine, the system's own work stays below this share.
const WORTH_A_WORD_PERCENT: f64 = 5.0;

/// CPU time since the machine started, in ticks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ticks {
    /// The time of all cores, idle time included.
    total: u64,
    /// Ticks in which the cores were busy.
    busy: u64,
    /// Ticks in which the hypervisor ran another virtual machine.
    steal: u64,
    /// Ticks in which the cores ran this process, or a process that it started and waited for.
    own: u64,
}

/// Measures the load of the machine since the creation of this value.
pub(super) struct Watch {
    start: Option<Ticks>,
}

/// How much of all cores' time was used by other processes, interrupts and other virtual machines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Load {
    /// The percentage of all cores' time that other processes and interrupts used.
    others_percent: f64,
    /// The percentage of all cores' time that other virtual machines used.
    steal_percent: f64,
}

impl Watch {
    pub(super) fn start() -> Watch {
        Watch { start: Ticks::now() }
    }

    /// Returns the load so far, or `None` if the system does not report it.
    pub(super) fn load(&self) -> Option<Load> {
        Load::between(self.start?, Ticks::now()?)
    }
}

impl Ticks {
    fn now() -> Option<Ticks> {
        let read = |path: &str| fs::read_to_string(path).ok();
        Ticks::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
    }

    fn parse(machine: &str, process: &str) -> Option<Ticks> {
        let cores = machine.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let cores: Vec<u64> = cores.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
        // `user` and `nice` include the time of guests, which Linux also lists separately.
        let [user, nice, system, idle, iowait, irq, softirq, steal] = *cores.first_chunk()?;
        let busy = user + nice + system + irq + softirq;
        // The name, in parentheses, may contain anything. The state comes next, and is the third field.
        let fields = process.rsplit_once(')')?.1.split_whitespace().skip(11).take(4);
        let own = fields.map(str::parse::<u64>).sum::<Result<u64, _>>().ok()?;
        Some(Ticks { total: busy + idle + iowait + steal, busy, steal, own })
    }
}

impl Load {
    fn between(start: Ticks, end: Ticks) -> Option<Load> {
        let total = end.total.checked_sub(start.total).filter(|total| *total > 0)?;
        let percent = |ticks: u64| 100.0 * ticks as f64 / total as f64;
        let own = end.own.saturating_sub(start.own);
        Some(Load {
            others_percent: percent(end.busy.saturating_sub(start.busy).saturating_sub(own)),
            steal_percent: percent(end.steal.saturating_sub(start.steal)),
        })
    }

    /// Returns a line that warns of unreliable figures, if the load is above the limit.
    pub(super) fn warning(&self) -> Option<String> {
        let Load { others_percent, steal_percent } = self;
        (others_percent + steal_percent > WORTH_A_WORD_PERCENT).then(|| {
            format!(
                "warning: other processes used {others_percent:.0} % of all cores' time, and other virtual \
                 machines {steal_percent:.0} %; repeat on an idle machine"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(machine: [u64; 8], own: u64) -> Ticks {
        let cores = machine.map(|ticks| ticks.to_string()).join(" ");
        let process = format!("7 (a) b (c) R 1 2 3 4 5 6 7 8 9 10 {own} 0 0 0 20 0");
        Ticks::parse(&format!("cpu  {cores} 99 98\ncpu0 1 1\n"), &process).unwrap()
    }

    #[test]
    fn what_others_used_is_told_apart_from_this_process() {
        let start = ticks([100, 0, 0, 100, 0, 0, 0, 0], 10);
        let end = ticks([160, 10, 5, 200, 5, 0, 5, 15], 80);
        // 200 ticks: 80 busy, 70 of them our own, and 15 stolen.
        let load = Load::between(start, end).unwrap();
        assert_eq!(load, Load { others_percent: 5.0, steal_percent: 7.5 });
        assert!(load.warning().unwrap().contains("5 % of all cores' time, and other virtual machines 8 %"));
    }

    #[test]
    fn an_idle_machine_is_worth_no_word() {
        let start = ticks([0; 8], 0);
        let load = Load::between(start, ticks([100, 0, 0, 900, 0, 0, 0, 10], 90)).unwrap();
        assert_eq!(load.warning(), None);
        assert_eq!(Load::between(start, start), None, "nothing was measured");
        assert_eq!(Ticks::parse("", ""), None);
        assert_eq!(Ticks::parse("cpu  1 2 3\n", "7 (a) R 1"), None);
    }
}
