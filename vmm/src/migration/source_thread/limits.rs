//! Time limits of the source's phases that depend on the guest's size and the client's request.

use std::time::Duration;

use vm_api::migration::{SendMigration, TimeoutStrategy};

use crate::migration::handover::source::Phase;

/// Time per GiB of guest memory for the target to create its VM: a vhost-user backend touches all of it, and has 2 s
/// per GiB ([`Phase::deadline`] has the fixed part).
const PREPARE_GIB: Duration = Duration::from_secs(4);
/// Minimum for sending the final pass and the state.
const LEAST_REST: Duration = Duration::from_secs(10);
/// Factor by which the final pass and the state may exceed the downtime target.
const REST_FACTOR: u32 = 10;
/// Minimum for copying memory.
const LEAST_COPY: Duration = Duration::from_secs(1);

/// Inputs of the limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    downtime: Duration,
    timeout: Duration,
    /// True if the pause of the guest is not limited (`timeout_strategy=ignore`).
    is_patient: bool,
    /// Guest memory in bytes.
    memory: u64,
}

impl Limits {
    /// Sets the limits for a guest with `memory` bytes.
    pub(super) fn new(config: &SendMigration, memory: u64) -> Self {
        Self {
            downtime: Duration::from_millis(config.downtime_ms.into()),
            timeout: Duration::from_secs(config.timeout_s.into()).max(LEAST_COPY),
            is_patient: config.timeout_strategy == TimeoutStrategy::Ignore,
            memory,
        }
    }

    /// Returns the limit of `phase`, if any. `is_rest`: most memory was copied or passed before the final pass; false
    /// if all of it is still to be sent, as for a paused guest.
    pub(super) fn of(&self, phase: Phase, is_rest: bool) -> Option<Duration> {
        match phase {
            Phase::Preparing => {
                let gib = u32::try_from(self.memory.div_ceil(1 << 30)).unwrap_or(u32::MAX);
                phase.deadline().map(|fixed| fixed.saturating_add(PREPARE_GIB.saturating_mul(gib)))
            }
            Phase::Copying | Phase::Finishing if self.is_patient => None,
            Phase::Finishing if is_rest => Some(LEAST_REST.max(self.downtime.saturating_mul(REST_FACTOR))),
            Phase::Copying | Phase::Finishing => Some(self.timeout),
            phase => phase.deadline(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn limits(options: &str, memory: u64) -> Limits {
        Limits::new(&format!("destination_url=unix:/s,{options}").parse().unwrap(), memory)
    }

    #[test]
    fn copying_is_limited_by_timeout_and_final_pass_by_downtime() {
        let seconds = |limits: Limits, phase, is_rest| limits.of(phase, is_rest).map(|limit| limit.as_secs());
        let usual = limits("timeout_s=600", GIB);
        assert_eq!(seconds(usual, Phase::Copying, true), Some(600));
        assert_eq!(seconds(usual, Phase::Finishing, true), Some(10));
        assert_eq!(seconds(limits("downtime_ms=4000", GIB), Phase::Finishing, true), Some(40));
        // A paused guest: all memory is sent in the final pass.
        assert_eq!(seconds(usual, Phase::Finishing, false), Some(600));
        assert_eq!(seconds(limits("timeout_s=0", GIB), Phase::Copying, true), Some(1));
        let patient = limits("timeout_s=600,timeout_strategy=ignore", GIB);
        for phase in [Phase::Copying, Phase::Finishing] {
            assert_eq!((patient.of(phase, true), patient.of(phase, false)), (None, None));
        }
    }

    #[test]
    fn a_target_has_longer_for_a_guest_with_more_memory() {
        let prepares = |memory| limits("downtime_ms=1", memory).of(Phase::Preparing, false).unwrap().as_secs();
        assert_eq!([GIB / 2, GIB, 2048 * GIB].map(prepares), [604, 604, 600 + 4 * 2048]);
        assert!(prepares(u64::MAX) > 600);
    }

    #[test]
    fn every_phase_but_those_of_disks_and_of_a_user_has_a_limit() {
        for phase in [
            Phase::Connecting,
            Phase::Greeting,
            Phase::Preparing,
            Phase::Copying,
            Phase::Stopping,
            Phase::Finishing,
            Phase::Loading,
            Phase::Releasing,
            Phase::Gone,
        ] {
            assert!(limits("local=on", GIB).of(phase, true).is_some(), "{phase:?}");
        }
        for phase in [Phase::Unknown, Phase::Undoing, Phase::Locking] {
            assert_eq!(limits("local=on", GIB).of(phase, true), None, "{phase:?}");
        }
    }
}
