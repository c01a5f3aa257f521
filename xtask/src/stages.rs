//! Time that the stages of a run take, and the share of it that the processors are busy.

use std::fs;
use std::time::{Duration, Instant};

use crate::progress::{note, seconds};

/// The stages of a run, in their order.
#[derive(Default)]
pub(crate) struct Stages(Vec<Stage>);

/// A stage that has ended.
struct Stage {
    name: &'static str,
    took: Duration,
    /// Share of the time of all processors that was used, by any program. `None` if the kernel does not count it.
    busy: Option<f64>,
}

impl Stages {
    /// Runs a stage and measures it.
    pub(crate) fn measure<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let (started, before) = (Instant::now(), Ticks::now());
        let result = work();
        let busy = before.zip(Ticks::now()).and_then(|(before, after)| after.busy_since(before));
        self.0.push(Stage { name, took: started.elapsed(), busy });
        result
    }

    /// Prints a line for each stage.
    pub(crate) fn print(&self) {
        self.0.iter().for_each(|stage| note("stage", stage.line()));
    }
}

impl Stage {
    fn line(&self) -> String {
        let busy = self.busy.map_or(String::new(), |busy| format!("  processors busy {:3.0} %", 100.0 * busy));
        format!("{:<26}  {:>12}{busy}", self.name, seconds(self.took))
    }
}

/// Time of all processors since the machine's start, in the kernel's unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    all: u64,
}

impl Ticks {
    fn now() -> Option<Ticks> {
        Ticks::of(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal (`proc_stat(5)`). The two
    /// that follow are of guests, and are contained in the first two.
    fn of(stat: &str) -> Option<Ticks> {
        let numbers = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(8);
        let numbers: Vec<u64> = numbers.map_while(|number| number.parse().ok()).collect();
        let [user, nice, system, idle, iowait, irq, softirq, steal] = numbers[..] else { return None };
        let busy = user + nice + system + irq + softirq;
        Some(Ticks { busy, all: busy + idle + iowait + steal })
    }

    fn busy_since(self, before: Ticks) -> Option<f64> {
        let all = self.all.checked_sub(before.all).filter(|all| *all > 0)?;
        Some(self.busy.saturating_sub(before.busy) as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busy_share_leaves_out_idle_and_waiting_processors() {
        let before = Ticks::of("cpu  10 20 30 1000 5 0 0 0 7 0\ncpu0 1 2 3 4\n").unwrap();
        assert_eq!(before, Ticks { busy: 60, all: 1065 });
        let after = Ticks::of("cpu  40 40 40 1030 15 0 0 0 90 0\n").unwrap();
        assert_eq!(after.busy_since(before), Some(0.6));
        assert_eq!(before.busy_since(after), None);
        assert_eq!(before.busy_since(before), None);
        assert_eq!(Ticks::of("cpu  10 20 30\n"), None);
    }

    #[test]
    fn a_stage_is_a_line_with_time_and_share() {
        let mut stages = Stages::default();
        assert_eq!(stages.measure("lint", || 7), 7);
        let lines: Vec<_> = stages.0.iter().map(Stage::line).collect();
        assert!(lines.len() == 1 && lines[0].starts_with("lint  "), "{lines:?}");
        let stage = Stage { name: "lint", took: Duration::from_secs(230), busy: Some(0.814) };
        assert_eq!(stage.line(), "lint                          3 min 50 s  processors busy  81 %");
    }
}
