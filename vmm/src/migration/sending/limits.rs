//! Limits of the source's stages that follow from the size of the guest and the client's request.

use std::time::Duration;

use vm_api::migration::{SendMigration, TimeoutStrategy};

use crate::migration::handover::sender::Stage;

/// Time that each GiB of the guest's memory adds for the target to make its VM: a vhost-user backend touches all of it,
/// and has 2 s for each GiB ([`Stage::deadline`] has the part that is the same for all guests).
const PREPARE_GIB: Duration = Duration::from_secs(4);
/// The least in which the rest of the memory and the state are sent.
const LEAST_REST: Duration = Duration::from_secs(10);
/// Factor by which they may exceed the goal for the downtime.
const REST_FACTOR: u32 = 10;
/// The least in which memory is copied.
const LEAST_COPY: Duration = Duration::from_secs(1);

/// Values that limits depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    downtime: Duration,
    timeout: Duration,
    /// True if the guest may be paused for as long as it takes.
    is_patient: bool,
    /// The guest's memory, in bytes.
    memory: u64,
}

impl Limits {
    /// Limits for a guest with so many bytes of memory.
    pub(super) fn new(config: &SendMigration, memory: u64) -> Self {
        Self {
            downtime: Duration::from_millis(config.downtime_ms.into()),
            timeout: Duration::from_secs(config.timeout_s.into()).max(LEAST_COPY),
            is_patient: config.timeout_strategy == TimeoutStrategy::Ignore,
            memory,
        }
    }

    /// Limit of `stage`, if it has one. With `is_rest`, memory that was copied before, or passed, is not sent again;
    /// without, as with a guest that was paused, all of it is still to be sent.
    pub(super) fn of(&self, stage: Stage, is_rest: bool) -> Option<Duration> {
        match stage {
            Stage::Preparing => {
                let gib = u32::try_from(self.memory.div_ceil(1 << 30)).unwrap_or(u32::MAX);
                stage.deadline().map(|fixed| fixed.saturating_add(PREPARE_GIB.saturating_mul(gib)))
            }
            Stage::Copying | Stage::Finishing if self.is_patient => None,
            Stage::Finishing if is_rest => Some(LEAST_REST.max(self.downtime.saturating_mul(REST_FACTOR))),
            Stage::Copying | Stage::Finishing => Some(self.timeout),
            stage => stage.deadline(),
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
    fn copying_ends_with_the_clients_time_and_the_rest_soon_after_the_goal() {
        let seconds = |limits: Limits, stage, is_rest| limits.of(stage, is_rest).map(|limit| limit.as_secs());
        let usual = limits("timeout_s=600", GIB);
        assert_eq!(seconds(usual, Stage::Copying, true), Some(600));
        assert_eq!(seconds(usual, Stage::Finishing, true), Some(10));
        assert_eq!(seconds(limits("downtime_ms=4000", GIB), Stage::Finishing, true), Some(40));
        // A guest that was paused before: all of its memory is the rest.
        assert_eq!(seconds(usual, Stage::Finishing, false), Some(600));
        assert_eq!(seconds(limits("timeout_s=0", GIB), Stage::Copying, true), Some(1));
        let patient = limits("timeout_s=600,timeout_strategy=ignore", GIB);
        for stage in [Stage::Copying, Stage::Finishing] {
            assert_eq!((patient.of(stage, true), patient.of(stage, false)), (None, None));
        }
    }

    #[test]
    fn a_target_has_longer_for_a_guest_with_more_memory() {
        let prepares = |memory| limits("downtime_ms=1", memory).of(Stage::Preparing, false).unwrap().as_secs();
        assert_eq!([GIB / 2, GIB, 2048 * GIB].map(prepares), [604, 604, 600 + 4 * 2048]);
        assert!(prepares(u64::MAX) > 600);
    }

    #[test]
    fn every_stage_but_those_of_disks_and_of_a_user_has_a_limit() {
        for stage in [
            Stage::Connecting,
            Stage::Greeting,
            Stage::Preparing,
            Stage::Copying,
            Stage::Stopping,
            Stage::Finishing,
            Stage::Loading,
            Stage::Releasing,
            Stage::Gone,
        ] {
            assert!(limits("local=on", GIB).of(stage, true).is_some(), "{stage:?}");
        }
        for stage in [Stage::Unknown, Stage::Undoing, Stage::Locking] {
            assert_eq!(limits("local=on", GIB).of(stage, true), None, "{stage:?}");
        }
    }
}
