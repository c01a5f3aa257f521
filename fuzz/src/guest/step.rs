//! A step of a device, compared with the standard's requirements.

use virtio_devices::testing::{Step, Stepped};

use super::{Driver, Snapshot};

/// Expected effects of a step, except on memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// End of the step.
    pub step: Step,
    /// True if it interrupts the driver.
    pub interrupt: bool,
    /// True if the device must want a doorbell for the next chain, because nothing else wakes it.
    pub doorbell: bool,
}

impl Expected {
    pub fn new(step: Step, interrupt: bool) -> Self {
        Self { step, interrupt, doorbell: step == Step::Doorbell }
    }
}

impl Driver {
    /// Guest memory before a step; `None` if no step can be judged, because the queue is at an invalid address. Nothing
    /// may break then.
    pub fn before_step<S: Stepped>(&self, steps: &mut S) -> Option<Snapshot> {
        let Some(mut queue) = steps.queue(&self.queue) else {
            assert!(!self.usual_place);
            return None;
        };
        if self.usual_place {
            return Some(Snapshot::take());
        }
        Self::run_anyhow(|| steps.step(&mut queue));
        None
    }

    /// Runs a step, which must end as `expected` and leave `ram` in memory. Returns its end; `None` if the device was
    /// free to do anything.
    pub fn step<S: Stepped>(&self, steps: &mut S, expected: Option<Expected>, ram: &Snapshot) -> Option<Step> {
        let mut queue = steps.queue(&self.queue).expect("the rings are where they were");
        let step = steps.step(&mut queue);
        let Expected { step: expected, interrupt, doorbell } = expected?;
        assert_eq!(step, expected);
        let (after, used) = (Snapshot::take(), self.devices_part());
        // The device may choose whether it wants doorbells, and rewrites the used index when it returns nothing.
        let free = [used.start..used.start + 4, used.end - 2..used.end];
        assert_eq!(after.differs_from(ram, &free), None, "the device wrote where it must not, or something else");
        assert_eq!(steps.take_interrupt(), interrupt);
        assert!(!doorbell || self.wants_doorbell(&after, self.taken), "the device would not be woken");
        Some(step)
    }
}
