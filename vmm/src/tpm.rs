//! TPM 2.0 backed by swtpm: registers for the guest, and a thread that forwards its commands.

mod crb;
mod error;
mod order;
mod swtpm;
#[cfg(test)]
mod tests;
mod worker;

use std::path::Path;
use std::sync::Arc;

use virtio_devices::{NewThread, Thread};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::layout;
use crate::exits::MmioHandler;
use crate::threads::{self, ThreadKind};
use crate::tpm::crb::CrbDevice;
pub(crate) use crate::tpm::error::TpmError;
use crate::tpm::order::Order;
use crate::tpm::swtpm::Swtpm;
use crate::tpm::worker::Worker;

/// Stack of the thread, in bytes.
const STACK: usize = 128 << 10;

/// A TPM. Dropping it ends its thread and closes its connection.
pub(crate) struct Tpm {
    device: Arc<CrbDevice>,
    thread: Option<Thread>,
}

impl Tpm {
    /// Connects to the swtpm at `socket`, and initialises its TPM.
    ///
    /// # Errors
    ///
    /// Fails if no program listens there, or it is not swtpm with a TPM 2.0.
    pub(crate) fn open(socket: &Path) -> Result<Self, TpmError> {
        let fail = |what: &'static str| move |error| TpmError::Io { path: socket.into(), what, error };
        let mut swtpm = Swtpm::connect(socket)?;
        swtpm.power_on()?;
        let kick = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(fail("make an eventfd"))?);
        let device = Arc::new(CrbDevice::new(Arc::clone(&kick)));
        let worker = Worker { swtpm, device: Arc::clone(&device), kick };
        let kind = ThreadKind::Tpm;
        let thread = threads::start(kind, NewThread::new(kind.name(), STACK, move || worker.run()));
        Ok(Self { device, thread: Some(thread.map_err(fail("start its thread"))?) })
    }

    /// Resets the TPM with the machine, without waiting: the next guest's first command waits for the reset.
    pub(crate) fn reset(&self) {
        self.device.reset();
    }

    /// Returns a handler for the TPM's addresses, with `rest` for all others.
    pub(crate) fn over(&self, rest: Arc<dyn MmioHandler>) -> Arc<dyn MmioHandler> {
        Arc::new(Over { device: Arc::clone(&self.device), rest })
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        self.device.order(Order::End);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the TPM's thread panicked; please report this");
        }
    }
}

/// The TPM's registers, and the handler of all other addresses.
struct Over {
    device: Arc<CrbDevice>,
    rest: Arc<dyn MmioHandler>,
}

/// Returns the offset of an address in the TPM's registers.
fn offset(address: u64) -> Option<u64> {
    layout::TPM.contains(&address).then(|| address - layout::TPM.start)
}

impl MmioHandler for Over {
    fn read(&self, address: u64, data: &mut [u8]) {
        match offset(address) {
            Some(offset) => self.device.read(offset, data),
            None => self.rest.read(address, data),
        }
    }

    fn write(&self, address: u64, data: &[u8]) {
        match offset(address) {
            Some(offset) => self.device.write(offset, data),
            None => self.rest.write(address, data),
        }
    }
}
