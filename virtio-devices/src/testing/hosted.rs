//! A device owned by a host, for tests.

use std::convert::Infallible;
use std::ops::{Deref, DerefMut};

use pci::{Device, Dword, DwordWrite, ResetKind, Rid, VfIndex, Window, WindowId};

use crate::{Fault, FaultError, Lifecycle, Outcome, Thread};

/// A device with its host. A host joins the workers that an access stopped before the access completes; here they are
/// kept until [`Self::join`], for tests to count.
pub struct Hosted<D> {
    device: D,
    stopping: Vec<Thread>,
}

impl<D> Hosted<D> {
    /// Creates a host with no stopped workers.
    pub fn new(device: D) -> Self {
        Self { device, stopping: Vec::new() }
    }

    /// Joins the stopped workers, and returns their number.
    pub fn join(&mut self) -> usize {
        let joined = std::mem::take(&mut self.stopping).into_iter().map(Thread::join);
        joined.filter(Result::is_ok).count()
    }

    /// The device, for another host.
    pub fn into_device(self) -> D {
        self.device
    }

    fn keep(&mut self, outcome: Outcome) -> pci::Outcome<Infallible> {
        self.stopping.extend(outcome.stopping);
        pci::Outcome::from(outcome.effects).within(outcome.reach)
    }
}

impl<D: Lifecycle> Hosted<D> {
    /// As [`Lifecycle::pause`].
    pub fn pause(&mut self) {
        let outcome = self.device.pause();
        let _ = self.keep(outcome);
    }

    /// As [`Lifecycle::resume`].
    pub fn resume(&mut self) {
        let outcome = self.device.resume();
        let _ = self.keep(outcome);
    }

    /// As [`Lifecycle::inject`].
    ///
    /// # Errors
    ///
    /// As [`Lifecycle::inject`].
    pub fn inject(&mut self, vf: Option<VfIndex>, fault: Fault) -> Result<(), FaultError> {
        let outcome = self.device.inject(vf, fault)?;
        let _ = self.keep(outcome);
        Ok(())
    }
}

impl<D> Deref for Hosted<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.device
    }
}

impl<D> DerefMut for Hosted<D> {
    fn deref_mut(&mut self) -> &mut D {
        &mut self.device
    }
}

impl<D: Device<Stopping = Thread>> Device for Hosted<D> {
    type Stopping = Infallible;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.device.config_read(rid, reg)
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> pci::Outcome<Infallible> {
        let outcome = self.device.config_write(rid, reg, write);
        self.keep(outcome)
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.device.mmio_read(window, offset, data);
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> pci::Outcome<Infallible> {
        let outcome = self.device.mmio_write(window, offset, data);
        self.keep(outcome)
    }

    fn may_send(&self, rid: Rid) -> bool {
        self.device.may_send(rid)
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.device.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> pci::Outcome<Infallible> {
        let outcome = self.device.reset(kind);
        self.keep(outcome)
    }
}
