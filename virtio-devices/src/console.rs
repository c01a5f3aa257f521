//! virtio-console with one port, over a character device (`virtio 1.4 §5.3`).
//!
//! A single thread serves both queues. Input waits at its source until the driver provides buffers. Output that cannot
//! be written is handled as [`CharDevice`] describes, so a guest never waits for its user.

mod counters;
mod port;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use crate::device::RING_FEATURES;
use crate::device::config::{ConfigField, Rule, read};
use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::os::chardev::CharDevice;
use crate::transport::features::has;
use crate::{Interrupts, Start, VirtioDevice, Worker};
pub use counters::{ConsoleCounter, ConsoleCounters};
use port::Port;

/// The device configuration (`virtio 1.4 §5.3.4`), without the fields of features that are not offered.
pub(crate) const FIELDS: &[ConfigField] = &[
    ConfigField::new("cols", 0, 2, Rule::Announced).of(F_SIZE),
    ConfigField::new("rows", 2, 2, Rule::Announced).of(F_SIZE),
];
/// Simple communication controller, other: the class that no other driver binds to.
const CLASS: [u8; 3] = [0x07, 0x80, 0x00];
const QUEUE_SIZES: &[u16] = &[256, 256];
/// The configuration has the console's size (`virtio 1.4 §5.3.3`, `VIRTIO_CONSOLE_F_SIZE`).
const F_SIZE: u32 = 0;

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConsoleSize {
    /// Characters in a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

/// The terminal of a console, whose size may change while the guest runs: shared by the console and the code that
/// watches the terminal.
#[derive(Debug)]
pub struct ConsoleWindow(Mutex<WindowState>);

#[derive(Debug)]
struct WindowState {
    size: ConsoleSize,
    generation: u8,
    /// Interrupts for a change of the size, while a driver runs that negotiated it.
    interrupts: Option<Arc<Interrupts>>,
}

impl ConsoleWindow {
    /// Creates a terminal with `size`.
    pub fn new(size: ConsoleSize) -> Self {
        Self(Mutex::new(WindowState { size, generation: 0, interrupts: None }))
    }

    /// Notifies the driver of a new terminal size.
    pub fn resize(&self, size: ConsoleSize) {
        let interrupts = {
            let mut state = self.0.lock();
            if state.size == size {
                return;
            }
            state.size = size;
            state.generation = state.generation.wrapping_add(1);
            state.interrupts.clone()
        };
        if let Some(interrupts) = interrupts {
            interrupts.signal_config();
        }
    }
}

/// A virtio console. It outlives resets of the device and reboots of the guest.
pub struct Console {
    device: Arc<CharDevice>,
    window: Option<Arc<ConsoleWindow>>,
    counted: Counted<ConsoleCounters>,
}

impl Console {
    /// Creates a console called `id` on `device`, in `window` if that is a terminal.
    pub fn new(id: &str, device: Arc<CharDevice>, window: Option<Arc<ConsoleWindow>>) -> Self {
        Self { device, window, counted: Counted::new(id) }
    }

    /// Id of the console.
    pub fn id(&self) -> &str {
        self.counted.id()
    }

    /// The console's character device.
    pub fn device(&self) -> &Arc<CharDevice> {
        &self.device
    }

    /// Counters of the console.
    pub fn counters(&self) -> Arc<ConsoleCounters> {
        Arc::clone(self.counted.counters())
    }

    /// Notifies the driver that there is a size to read, and signals changes to `interrupts` from now on, or to nothing
    /// if `None`.
    ///
    /// Linux 6.1 and others read no size until notified of a change (`virtio 1.4 §5.3.6`). Drivers that have read it
    /// read the same size again.
    fn signal_to(&self, interrupts: Option<Arc<Interrupts>>) {
        let Some(ConsoleWindow(state)) = self.window.as_deref() else { return };
        state.lock().interrupts.clone_from(&interrupts);
        if let Some(interrupts) = interrupts {
            interrupts.signal_config();
        }
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_CONSOLE as u16
    }

    fn class(&self) -> [u8; 3] {
        CLASS
    }

    fn features(&self) -> u64 {
        RING_FEATURES | u64::from(self.window.is_some()) << F_SIZE
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    /// Columns and rows (`virtio 1.4 §5.3.4`, `struct virtio_console_config`).
    fn config_read(&self, offset: u64, data: &mut [u8]) {
        let size = self.window.as_ref().map(|window| window.0.lock().size);
        let ConsoleSize { columns, rows } = size.unwrap_or_default();
        let ([a, b], [c, d]) = (columns.to_le_bytes(), rows.to_le_bytes());
        read(&[a, b, c, d], offset, data);
    }

    fn config_generation(&self) -> u8 {
        self.window.as_ref().map_or(0, |window| window.0.lock().generation)
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let driver = has(start.features, F_SIZE).then(|| Arc::clone(&start.interrupts));
        let port = Port::new(Arc::clone(&self.device));
        let id = self.counted.id();
        let workers = queue_worker::start(port, WorkerKind::Console, id, start, self.counted.counters())?;
        if !workers.is_empty() {
            self.signal_to(driver);
        }
        Ok(workers)
    }

    fn reset(&mut self) {
        self.counted.was_reset();
        self.signal_to(None);
    }
}
