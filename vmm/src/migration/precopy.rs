//! Policy of precopy: throttling the guest, and stopping it.
//!
//! Each pass sends the pages dirtied in the previous one. The guest is stopped once sending the remaining pages, plus
//! fixed costs, fits the downtime target and another pass would not shrink them much.

use std::time::Duration;

pub use vm_api::migration::TimeoutStrategy;

/// Limits that the client sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goal {
    /// Target for the downtime.
    pub downtime: Duration,
    /// Time for copying, after which `strategy` applies.
    pub timeout: Duration,
    /// Action at the timeout.
    pub strategy: TimeoutStrategy,
}

/// Next step after a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Another pass.
    CopyAgain,
    /// Stop the guest and send the remaining pages.
    StopGuest,
    /// End the migration: the timeout has passed.
    Fail,
}

/// Measurements of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Bytes of pages that were sent, without zero pages.
    pub sent: u64,
    /// Duration of the pass.
    pub took: Duration,
    /// Bytes that are dirty now.
    pub rest: u64,
    /// Time since copying started.
    pub elapsed: Duration,
}

/// Initial estimate of the downtime's fixed part: stopping vCPUs and devices, saving and loading state, messages of the
/// handover.
const FIXED: Duration = Duration::from_millis(10);
/// Addition for each function in use by a driver, except the first: 8 VFs take 17 ms where one NIC takes 10
/// (docs/performance.md).
const FUNCTION: Duration = Duration::from_millis(1);
/// Lower bound of the bandwidth in estimates, in bytes per second.
const SLOWEST: u64 = 64 << 10;
/// Remaining bytes that are not worth another pass.
const SMALL: u64 = 1 << 20;
/// Limit on passes within the downtime target that shrink the remainder further.
const MOST_SHRINKING: u32 = 8;
/// Step of throttling, in percent of the vCPUs' time.
const STEP: u8 = 10;
/// Limit of throttling, in percent.
const MOST_THROTTLE: u8 = 99;

/// The policy and its measurements.
#[derive(Debug, Clone)]
pub struct Precopy {
    goal: Goal,
    /// Fixed part of the downtime.
    fixed: Duration,
    /// Measured bandwidth in bytes per second; 0 before the first pass.
    bandwidth: u64,
    /// Rate at which the guest dirties pages, in bytes per second.
    dirty_rate: u64,
    passes: u32,
    /// Dirty bytes after the previous pass.
    rest: Option<u64>,
    /// Passes in a row that did not shrink the remainder.
    futile: u32,
    /// Passes since the downtime target was met.
    within: u32,
    throttle: u8,
}

impl Precopy {
    /// Creates the policy for `goal`, with the round-trip time `rtt`.
    pub fn new(goal: Goal, rtt: Duration) -> Self {
        Self {
            goal,
            fixed: FIXED + rtt * 2,
            bandwidth: 0,
            dirty_rate: 0,
            passes: 0,
            rest: None,
            futile: 0,
            within: 0,
            throttle: 0,
        }
    }

    /// Sets the round-trip time, and the number of functions in use by the guest's drivers.
    pub fn expect(&mut self, rtt: Duration, functions: u32) {
        self.fixed = FIXED + FUNCTION.saturating_mul(functions.saturating_sub(1)) + rtt * 2;
    }

    /// Number of passes so far.
    pub const fn passes(&self) -> u32 {
        self.passes
    }

    /// Measured bandwidth, in bytes per second.
    pub const fn bandwidth(&self) -> u64 {
        self.bandwidth
    }

    /// Rate at which the guest dirties pages, in bytes per second.
    pub const fn dirty_rate(&self) -> u64 {
        self.dirty_rate
    }

    /// Share of the vCPUs' time to withhold, in percent.
    pub const fn throttle(&self) -> u8 {
        self.throttle
    }

    /// Estimates the downtime if the guest were stopped with `rest` bytes to send.
    pub fn estimate(&self, rest: u64) -> Duration {
        let nanos = u128::from(rest) * 1_000_000_000 / u128::from(self.bandwidth.max(SLOWEST));
        self.fixed + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The downtime target, but at least the fixed part plus a tenth, which no pass shortens.
    fn reachable(&self) -> Duration {
        self.goal.downtime.max(self.fixed + self.fixed / 10)
    }

    /// Decides the next step after a pass.
    pub fn after(&mut self, pass: Pass) -> Decision {
        let Pass { sent, took, rest, elapsed } = pass;
        self.passes += 1;
        self.measure(sent, took, rest);
        let before = self.rest.replace(rest);
        // Another pass is worth it for a quarter less.
        let shrinks = before.is_none_or(|before| rest <= before - before / 4);
        if self.estimate(rest) <= self.reachable() {
            self.within += 1;
            let is_worth_it = rest > SMALL && shrinks && self.within <= MOST_SHRINKING && elapsed < self.goal.timeout;
            return if is_worth_it { Decision::CopyAgain } else { Decision::StopGuest };
        }
        if elapsed >= self.goal.timeout {
            return match self.goal.strategy {
                TimeoutStrategy::Cancel => Decision::Fail,
                TimeoutStrategy::Ignore => Decision::StopGuest,
            };
        }
        self.futile = if shrinks { 0 } else { self.futile + 1 };
        if self.futile >= 2 {
            self.futile = 0;
            self.throttle = self.throttle.saturating_add(STEP).min(MOST_THROTTLE);
        }
        Decision::CopyAgain
    }

    /// Updates the rates. A pass with little data does not show the bandwidth.
    fn measure(&mut self, sent: u64, took: Duration, rest: u64) {
        let micros = took.as_micros().max(1);
        let per_second = |bytes: u64| u64::try_from(u128::from(bytes) * 1_000_000 / micros).unwrap_or(u64::MAX);
        self.dirty_rate = per_second(rest);
        if sent >= SMALL || self.bandwidth == 0 {
            self.bandwidth = match (per_second(sent), self.bandwidth) {
                (now, 0) => now,
                // The newest pass counts half: the final pass will be most like it.
                (now, before) => now / 2 + before / 2,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn goal(strategy: TimeoutStrategy) -> Goal {
        Goal { downtime: Duration::from_millis(300), timeout: Duration::from_secs(3600), strategy }
    }

    /// Copies `size` bytes at `bandwidth`, while the guest dirties `rate` bytes per second within a `working_set`.
    /// Returns the decision, the policy, the remaining bytes, and the time taken.
    fn run(
        (size, bandwidth): (u64, u64),
        (rate, working_set): (u64, u64),
        goal: Goal,
    ) -> (Decision, Precopy, u64, Duration) {
        let mut policy = Precopy::new(goal, Duration::from_micros(200));
        let (mut sent, mut elapsed) = (size, Duration::ZERO);
        loop {
            let took = Duration::from_secs_f64(sent as f64 / bandwidth as f64).max(Duration::from_micros(50));
            elapsed += took;
            let rate = rate * u64::from(100 - policy.throttle()) / 100;
            let rest = ((rate as f64 * took.as_secs_f64()) as u64).min(working_set) / 4096 * 4096;
            let decision = policy.after(Pass { sent, took, rest, elapsed });
            if decision != Decision::CopyAgain {
                return (decision, policy, rest, elapsed);
            }
            assert!(policy.passes() < 100_000);
            sent = rest;
        }
    }

    #[test]
    fn an_idle_guest_is_stopped_with_next_to_nothing_left() {
        let (decision, policy, rest, _) = run((512 * MIB, 1024 * MIB), (MIB, MIB), goal(TimeoutStrategy::Cancel));
        assert_eq!((decision, policy.throttle()), (Decision::StopGuest, 0));
        assert!(rest <= MIB && policy.passes() <= 4, "{rest} {}", policy.passes());
    }

    #[test]
    fn passes_continue_past_the_goal_while_they_shrink_the_rest() {
        // 250 MiB would meet the target after the first pass.
        let (decision, policy, rest, _) =
            run((1024 * MIB, 1024 * MIB), (250 * MIB, 250 * MIB), goal(TimeoutStrategy::Cancel));
        assert_eq!(decision, Decision::StopGuest);
        assert!(policy.passes() > 2 && rest <= 4 * MIB, "{} {rest}", policy.passes());
        // Passes over pages that are always dirty gain nothing.
        let (decision, policy, ..) =
            run((1024 * MIB, 1024 * MIB), (4096 * MIB, 200 * MIB), goal(TimeoutStrategy::Cancel));
        assert_eq!((decision, policy.passes() <= 3), (Decision::StopGuest, true));
    }

    #[test]
    fn the_estimate_has_what_no_bandwidth_shortens() {
        let mut policy = Precopy::new(goal(TimeoutStrategy::Cancel), Duration::from_millis(100));
        let pass = |rest| Pass { sent: 100 * MIB, took: Duration::from_secs(1), rest, elapsed: Duration::from_secs(1) };
        // 10 ms, two round trips, and 90 ms for 9 MiB at 100 MiB/s.
        assert_eq!(policy.after(pass(9 * MIB)), Decision::CopyAgain);
        assert_eq!(policy.estimate(9 * MIB), Duration::from_millis(300));
        assert_eq!(policy.after(pass(9 * MIB + 4096)), Decision::CopyAgain);
        assert!(policy.estimate(9 * MIB + 4096) > Duration::from_millis(300));
        assert_eq!(policy.after(pass(9 * MIB)), Decision::StopGuest);
    }

    #[test]
    fn the_estimate_has_the_functions_that_have_to_stop_and_start() {
        let mut policy = Precopy::new(goal(TimeoutStrategy::Cancel), Duration::ZERO);
        let mut estimate = |rtt, functions| {
            policy.expect(Duration::from_millis(rtt), functions);
            policy.estimate(0).as_millis()
        };
        assert_eq!([estimate(0, 0), estimate(0, 1), estimate(0, 9), estimate(5, 1)], [10, 10, 18, 20]);
        assert!(estimate(0, u32::MAX) > 1_000_000);
    }

    #[test]
    fn guest_that_outpaces_the_link_is_throttled_until_it_fits() {
        let (decision, policy, rest, _) =
            run((1024 * MIB, 100 * MIB), (150 * MIB, 1024 * MIB), goal(TimeoutStrategy::Cancel));
        assert_eq!(decision, Decision::StopGuest);
        assert!((40..=99).contains(&policy.throttle()), "{}", policy.throttle());
        assert!(policy.estimate(rest) <= Duration::from_millis(300));
    }

    #[test]
    fn unreachable_downtime_goal_is_met_as_closely_as_possible() {
        let goal = Goal { downtime: Duration::from_millis(1), ..goal(TimeoutStrategy::Cancel) };
        let (decision, policy, rest, elapsed) = run((1024 * MIB, 1024 * MIB), (MIB / 2, MIB / 2), goal);
        assert_eq!((decision, policy.throttle()), (Decision::StopGuest, 0));
        assert!(policy.estimate(rest) < Duration::from_millis(12) && elapsed < Duration::from_secs(2));
    }

    #[test]
    fn after_the_timeout_the_strategy_decides() {
        let short = |strategy| Goal { timeout: Duration::from_secs(30), ..goal(strategy) };
        for (strategy, expected) in
            [(TimeoutStrategy::Cancel, Decision::Fail), (TimeoutStrategy::Ignore, Decision::StopGuest)]
        {
            let (decision, policy, rest, elapsed) =
                run((1024 * MIB, 100 * MIB), (400 * MIB, 1024 * MIB), short(strategy));
            assert_eq!(decision, expected);
            assert!(elapsed >= Duration::from_secs(30) && policy.estimate(rest) > Duration::from_millis(300));
        }
        // Once the target is met, the strategy does not matter.
        let (decision, ..) = run((8192 * MIB, 100 * MIB), (0, 0), short(TimeoutStrategy::Cancel));
        assert_eq!(decision, Decision::StopGuest);
    }

    #[test]
    fn no_numbers_panic() {
        let mut policy = Precopy::new(goal(TimeoutStrategy::Ignore), Duration::MAX / 4);
        for pass in [
            Pass { sent: 0, took: Duration::ZERO, rest: u64::MAX, elapsed: Duration::ZERO },
            Pass { sent: u64::MAX, took: Duration::ZERO, rest: 0, elapsed: Duration::MAX },
            Pass { sent: u64::MAX, took: Duration::MAX, rest: u64::MAX, elapsed: Duration::MAX },
        ] {
            policy.after(pass);
        }
    }
}
