//! How far a driver's queues have come on a backend that runs them.

use std::sync::atomic::{AtomicBool, Ordering};

/// What is known of a driver's queues on a backend that runs them itself. It outlives workers: one may be stopped
/// before its backend is there. A reset of the device makes a new one.
#[derive(Debug)]
pub(crate) struct Progress {
    /// No backend has been started for this driver, or its link was down since.
    fresh: AtomicBool,
    /// A backend may have taken something from this driver's rings.
    touched: AtomicBool,
}

impl Progress {
    /// The progress of a driver that is yet to come.
    pub(crate) fn new() -> Self {
        Self { fresh: AtomicBool::new(true), touched: AtomicBool::new(false) }
    }

    /// Whether what the backend has for the driver is older than the driver, or than its link.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh.load(Ordering::Acquire)
    }

    /// Changes [`Self::is_fresh`].
    pub(crate) fn set_fresh(&self, fresh: bool) {
        self.fresh.store(fresh, Ordering::Release);
    }

    /// Whether the backend may have taken something from the driver's rings: it was started, whether it said that it
    /// runs or not.
    pub(crate) fn is_touched(&self) -> bool {
        self.touched.load(Ordering::Acquire)
    }

    /// A backend is about to look at the driver's rings, or has done so before.
    pub(crate) fn set_touched(&self) {
        self.touched.store(true, Ordering::Release);
    }
}
