//! A balloon's size: requested by the host, and reported by the driver.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::Interrupts;
use crate::device::config::read;
use crate::memory::discard::PAGE;

/// The offset of `actual` in the device configuration.
const ACTUAL: u64 = 4;

/// The size of a balloon, which may change while the guest runs: shared by the balloon and the code that resizes it.
/// Initially 0.
#[derive(Debug, Default)]
pub struct BalloonSize(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The size that the host requests, in pages.
    num_pages: u32,
    /// The size that the driver reports, in pages.
    actual: u32,
    generation: u8,
    /// Interrupts for a change while a driver runs.
    interrupts: Option<Arc<Interrupts>>,
}

impl BalloonSize {
    /// Requests a balloon of `bytes`, rounded down to 4 KiB, which the driver reaches after some time. Without a
    /// driver, the request is for the next one.
    pub fn resize(&self, bytes: u64) {
        let interrupts = {
            let mut state = self.0.lock();
            if state.num_pages == pages(bytes) {
                return;
            }
            state.num_pages = pages(bytes);
            state.generation = state.generation.wrapping_add(1);
            state.interrupts.clone()
        };
        if let Some(interrupts) = interrupts {
            interrupts.signal_config();
        }
    }

    /// The size in bytes that the host requests.
    pub fn requested(&self) -> u64 {
        u64::from(self.0.lock().num_pages) * PAGE
    }

    /// The size in bytes that the driver reports. Not validated.
    pub fn actual(&self) -> u64 {
        u64::from(self.actual_pages()) * PAGE
    }

    /// The size in pages that the driver reports.
    pub(super) fn actual_pages(&self) -> u32 {
        self.0.lock().actual
    }

    pub(super) fn set_actual_pages(&self, actual: u32) {
        self.0.lock().actual = actual;
    }

    pub(super) fn generation(&self) -> u8 {
        self.0.lock().generation
    }

    /// Signals changes to `interrupts` from now on, or to nothing if `None`. A driver reads the size when it starts.
    pub(super) fn signal_to(&self, interrupts: Option<Arc<Interrupts>>) {
        self.0.lock().interrupts = interrupts;
    }

    /// Reads the device configuration at `offset` (`virtio 1.4 §5.5.4`, `struct virtio_balloon_config`).
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.0.lock();
        let words = [state.num_pages.to_le_bytes(), state.actual.to_le_bytes()];
        read(words.as_flattened(), offset, data);
    }

    /// Writes `data` at `offset` of the device configuration. Only `actual` is writable.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.0.lock();
        let mut actual = state.actual.to_le_bytes();
        for (index, byte) in data.iter().enumerate() {
            let at = offset.saturating_add(index as u64).checked_sub(ACTUAL).and_then(|at| usize::try_from(at).ok());
            if let Some(slot) = at.and_then(|at| actual.get_mut(at)) {
                *slot = *byte;
            }
        }
        state.actual = u32::from_le_bytes(actual);
    }
}

/// `bytes` in pages of 4 KiB, limited to the field's maximum.
fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE).unwrap_or(u32::MAX)
}
