//! The progress of a driver's queues on a backend that runs them.

use std::sync::atomic::{AtomicBool, Ordering};

/// The progress of a driver's queues on a backend that runs them itself. It outlives workers: one may be stopped before
/// its backend exists. A reset of the device creates a new one.
#[derive(Debug)]
pub(crate) struct Progress {
    /// No backend has been started for this driver, or its link was down since.
    fresh: AtomicBool,
    /// A backend may have taken buffers from this driver's rings.
    touched: AtomicBool,
}

impl Progress {
    /// The progress before a driver starts.
    pub(crate) fn new() -> Self {
        Self { fresh: AtomicBool::new(true), touched: AtomicBool::new(false) }
    }

    /// True if the backend's frames for the driver may be older than the driver, or than its link.
    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh.load(Ordering::Acquire)
    }

    /// Changes [`Self::is_fresh`].
    pub(crate) fn set_fresh(&self, fresh: bool) {
        self.fresh.store(fresh, Ordering::Release);
    }

    /// True if the backend may have taken buffers from the driver's rings: a start was tried, with or without success.
    pub(crate) fn is_touched(&self) -> bool {
        self.touched.load(Ordering::Acquire)
    }

    /// Records that a backend is about to read the driver's rings, or has done so before.
    pub(crate) fn set_touched(&self) {
        self.touched.store(true, Ordering::Release);
    }
}
