//! A virtio device as a PCI function: the same type for a plain device, a PF and a VF.

mod config_access;
mod layout;
mod run;
mod state;

use std::sync::Arc;
use std::thread::JoinHandle;

use log::warn;
use pci::{
    BarIndex, BarKind, ConfigShape, ConfigSpace, Device, Dword, DwordWrite, Effects, Identity, ResetKind, Rid, Role,
    ShapeError, VfIndex, Window, WindowId,
};

use self::layout::Place;
pub(crate) use self::layout::{Layout, REGISTERS_BAR, Spacing};
use self::run::Run;
use crate::transport::{Change, Transport};
use crate::{
    DeviceState, Doorbell, DoorbellObserver, FunctionStatus, Memory, Message, Port, QueueError, Start, StateError,
    Status, VirtioDevice, VirtioPci,
};

/// The Vendor ID of virtio devices (`virtio 1.4 §4.1.2`).
const VENDOR: u16 = 0x1af4;
/// The Device ID of the device type 0.
const FIRST_DEVICE: u16 = 0x1040;
/// A device that has no legacy interface has a Revision ID of 1 or more.
const REVISION: u8 = 1;

/// The PCI Device ID of a virtio device type.
pub(crate) fn device_id(device_type: u16) -> u16 {
    FIRST_DEVICE.saturating_add(device_type)
}

/// Why a device cannot be a function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FunctionError {
    /// Its queues cannot be.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// Its configuration space cannot be.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// A virtio device, its transport and its configuration space.
///
/// Its queues run as long as the driver wants them to (DRIVER_OK, and neither side has given up), Bus Master Enable is set,
/// the function is in D0 and the host has not paused it. A stop that is not a reset keeps the queues and their positions.
pub struct VirtioFunction<D> {
    rid: Rid,
    layout: Layout,
    config: ConfigSpace,
    transport: Transport,
    device: D,
    memory: Memory,
    /// The queues, from the first time they run until a reset.
    run: Option<Run>,
    /// The host wants the queues to stand still.
    paused: bool,
    stopping: Vec<JoinHandle<()>>,
    start_failures: u64,
}

impl<D: VirtioDevice> VirtioFunction<D> {
    /// A function that is neither a PF nor a VF, at `rid`.
    ///
    /// # Errors
    ///
    /// When the device's queues cannot be.
    pub fn plain(device: D, rid: Rid, memory: Memory) -> Result<Self, FunctionError> {
        let spacing = Spacing::of([&device]);
        Self::new(device, rid, (Role::Plain, spacing), memory)
    }

    /// A function with a role, whose doorbells are as far apart as `spacing` says. The BARs of a VF are its PF's to decode.
    pub(crate) fn new(
        device: D,
        rid: Rid,
        (role, spacing): (Role, Spacing),
        memory: Memory,
    ) -> Result<Self, FunctionError> {
        let queue_sizes = device.queue_sizes();
        let count = u16::try_from(queue_sizes.len()).map_err(|_| QueueError::Count(queue_sizes.len()))?;
        let layout = Layout::new(count, spacing);
        let sr_iov = matches!(role, Role::Pf(_));
        let transport = Transport::new(device.features(), sr_iov, queue_sizes, layout.msix().vectors)?;
        let transport = transport.requiring(device.feature_requirements());
        let id = device_id(device.device_type());
        let identity = Identity {
            vendor: VENDOR,
            device: id,
            revision: REVISION,
            class: device.class(),
            subsystem_vendor: VENDOR,
            subsystem: id,
        };
        let bars = if role == Role::Vf { Vec::new() } else { layout.bars() };
        let config =
            ConfigSpace::new(ConfigShape { identity, role, bars, vendor: layout.capabilities(), msix: layout.msix() })?;
        let (run, paused, stopping, start_failures) = (None, false, Vec::new(), 0);
        Ok(Self { rid, layout, config, transport, device, memory, run, paused, stopping, start_failures })
    }

    /// The BARs that a function of this device decodes.
    pub(crate) fn bars(device: &D, spacing: Spacing) -> Result<Vec<(BarIndex, BarKind)>, QueueError> {
        let count = device.queue_sizes().len();
        Ok(Layout::new(u16::try_from(count).map_err(|_| QueueError::Count(count))?, spacing).bars())
    }

    /// The routing ID.
    pub fn rid(&self) -> Rid {
        self.rid
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, to change what is the host's to change.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// The device status, as the driver reads it.
    pub fn status(&self) -> Status {
        self.transport.status()
    }

    /// Whether the queues run.
    pub fn is_running(&self) -> bool {
        self.run.as_ref().is_some_and(Run::is_running)
    }

    /// Whether there are queues, be it that they stand still at the moment: from DRIVER_OK to a reset.
    pub(crate) fn has_queues(&self) -> bool {
        self.run.is_some()
    }

    /// How often the queues could not be started, for want of a thread or a file descriptor.
    pub fn start_failures(&self) -> u64 {
        self.start_failures
    }

    pub(crate) fn config(&self) -> &ConfigSpace {
        &self.config
    }

    /// Reads a dword of configuration space.
    pub(crate) fn config_read(&self, reg: Dword) -> u32 {
        self.config_access_read(reg).unwrap_or_else(|| self.config.read(reg))
    }

    /// Writes a dword of configuration space. `powered` says whether what the function depends on for its power, a VF its PF,
    /// is in D0.
    pub(crate) fn config_write(&mut self, reg: Dword, write: DwordWrite, powered: bool) -> Effects {
        let registers = self.config.write(reg, write);
        let effects = registers.and(self.config_access_write(reg, write));
        self.apply(effects, powered)
    }

    /// Does what is the function's own of `effects` and returns the rest.
    fn apply(&mut self, effects: Effects, powered: bool) -> Effects {
        if effects.reset.is_some() {
            self.transport.reset();
            self.reset_device();
        }
        if effects.queues {
            self.settle(powered);
        }
        Effects { reset: None, ..effects }
    }

    /// Reads `data.len()` bytes at `offset` of `bar`. What is outside of the BARs reads all-ones, what is between their
    /// structures 0.
    pub(crate) fn bar_read(&self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        let Some(place) = self.layout.locate(bar, offset, data.len()) else { return data.fill(0xff) };
        data.fill(0);
        match place {
            Place::Common(offset) => self.transport.read(offset, data, self.device.config_generation()),
            Place::Isr => {
                if let [isr] = data {
                    *isr = self.transport.interrupts().take_isr();
                }
            }
            Place::DeviceConfig(offset) => self.device.config_read(offset, data),
            Place::Table(offset) => self.config.msix().table_read(offset, data),
            Place::Pba(offset) => {
                let interrupts = self.transport.interrupts();
                // What may be sent now is not pending: its eventfd may still hold a signal that has been sent.
                let pending = |vector| self.message(vector).is_none() && interrupts.is_signalled(vector);
                self.config.msix().pba_read(offset, data, pending);
            }
            Place::Doorbell(_) | Place::Hole => {}
        }
    }

    /// Writes `data` at `offset` of `bar`; for `powered` see [`Self::config_write`].
    pub(crate) fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8], powered: bool) -> Effects {
        let effects = self.bar_store(bar, offset, data);
        self.apply(effects, powered)
    }

    fn bar_store(&mut self, bar: BarIndex, offset: u64, data: &[u8]) -> Effects {
        match self.layout.locate(bar, offset, data.len()) {
            Some(Place::Common(offset)) => match self.transport.write(offset, data) {
                Change::None => Effects::NONE,
                Change::Vectors => {
                    self.run.iter().for_each(Run::wake);
                    Effects { messages: true, ..Effects::NONE }
                }
                // With the first start of its queues the function has messages to send.
                Change::Status => Effects { queues: true, messages: true, ..Effects::NONE },
                Change::Reset => {
                    self.reset_device();
                    Effects { queues: true, messages: true, ..Effects::NONE }
                }
            },
            Some(Place::DeviceConfig(offset)) => {
                self.device.config_write(offset, data);
                Effects::NONE
            }
            // Usually an ioeventfd takes it; one that is not in place yet must not cost the signal.
            Some(Place::Doorbell(queue)) if !data.is_empty() => {
                self.run.iter().for_each(|run| run.ring(queue));
                Effects::NONE
            }
            Some(Place::Table(offset)) => self.config.msix_mut().table_write(offset, data),
            _ => Effects::NONE,
        }
    }

    /// Resets the function: its registers, its transport and its device.
    pub(crate) fn reset_function(&mut self, kind: ResetKind) -> Effects {
        let effects = self.config.reset(kind);
        self.apply(effects, true)
    }

    /// Stops the queues for good, and resets the device.
    fn reset_device(&mut self) {
        if let Some(mut run) = self.run.take() {
            run.stop(&mut self.stopping);
        }
        self.device.reset();
    }

    /// Lets the queues stand still until [`Self::resume`].
    pub(crate) fn pause(&mut self) {
        self.paused = true;
        self.settle(false);
    }

    /// Lets the queues run again if the registers and `powered` say so.
    pub(crate) fn resume(&mut self, powered: bool) {
        self.paused = false;
        self.settle(powered);
    }

    /// Makes the queues run or stand still, as the registers, the host and `powered` say.
    pub(crate) fn settle(&mut self, powered: bool) {
        if self.transport.ready() && self.config.bus_master() && powered && !self.paused {
            self.start();
        } else if let Some(run) = &mut self.run {
            run.stop(&mut self.stopping);
        }
    }

    fn start(&mut self) {
        let transport = &self.transport;
        let run = self.run.get_or_insert_with(|| Run::new(transport.queues()));
        if run.is_running() {
            return;
        }
        let start = Start {
            memory: self.memory.clone(),
            features: transport.features(),
            queues: run.queues().to_vec(),
            interrupts: Arc::clone(transport.interrupts()),
        };
        if let Err(error) = run.start(&mut self.device, start) {
            self.transport.interrupts().ask_for_reset();
            self.start_failures = self.start_failures.saturating_add(1);
            // A guest can try again as often as it likes; the log grows with the logarithm of that.
            if self.start_failures.is_power_of_two() {
                let times = self.start_failures;
                warn!(
                    "{}: cannot start its queues ({times} times so far): {error}; its driver must reset it",
                    self.rid
                );
            }
        }
    }

    /// Appends the doorbells of the queues that run. The function's registers are at `base` of `window`.
    pub(crate) fn doorbells(&self, window: WindowId, base: u64, out: &mut Vec<Doorbell>) {
        let pages = self.device.doorbell_pages();
        out.extend(self.run.iter().flat_map(Run::doorbells).map(|(queue, eventfd)| Doorbell {
            function: self.rid,
            window,
            offset: base.saturating_add(self.layout.doorbell(queue)),
            eventfd: Arc::clone(eventfd),
            page: pages.and_then(|pages| pages.get(queue)),
        }));
    }

    /// Has `observer` told that this function's doorbells have changed by themselves.
    pub(crate) fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>) {
        if let Some(pages) = self.device.doorbell_pages() {
            let (rid, observer) = (self.rid, Arc::clone(observer));
            pages.observe(Box::new(move || observer(rid)));
        }
    }

    /// Appends the messages that the function may send.
    pub(crate) fn messages(&self, out: &mut Vec<Message>) {
        let interrupts = self.transport.interrupts();
        out.extend((0..self.config.msix().vectors()).filter_map(|vector| {
            let (address, data) = self.message(vector)?;
            Some(Message { requester: self.rid, address, data, eventfd: interrupts.eventfd(vector)? })
        }));
    }

    /// The address and data of `vector`, if the function may send its message now.
    fn message(&self, vector: u16) -> Option<(u64, u32)> {
        // Before its queues have run for the first time the device has nothing to say: all its vectors are wired at once then, and
        // not one by one while the driver sets them up.
        if self.run.is_none() || !self.config.bus_master() {
            return None;
        }
        self.config.msix().message(vector)
    }

    /// Moves the workers that were told to stop to `out`.
    pub(crate) fn drain_stopping(&mut self, out: &mut Vec<JoinHandle<()>>) {
        out.append(&mut self.stopping);
    }
}

/// A function that is neither a PF nor a VF is a device by itself.
impl<D: VirtioDevice> Device for VirtioFunction<D> {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        if rid == self.rid { self.config_read(reg) } else { pci::spec::ALL_ONES }
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Effects {
        if rid == self.rid { self.config_write(reg, write, true) } else { Effects::NONE }
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        match window {
            WindowId::Bar(bar) => self.bar_read(bar, offset, data),
            WindowId::VfBar(_) => data.fill(0xff),
        }
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Effects {
        match window {
            WindowId::Bar(bar) => self.bar_write(bar, offset, data, true),
            WindowId::VfBar(_) => Effects::NONE,
        }
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.config.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Effects {
        self.reset_function(kind)
    }
}

impl<D: VirtioDevice> VirtioPci for VirtioFunction<D> {
    fn doorbells(&self, out: &mut Vec<Doorbell>) {
        self.doorbells(WindowId::Bar(REGISTERS_BAR), 0, out);
    }

    fn messages(&self, out: &mut Vec<Message>) {
        self.messages(out);
    }

    fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>) {
        self.observe_doorbells(observer);
    }

    fn num_visible(&self) -> u16 {
        0
    }

    fn config_is_static(&self, _rid: Rid) -> bool {
        self.config_is_static()
    }

    fn take_stopping(&mut self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.stopping)
    }

    fn function_status(&self, vf: Option<VfIndex>) -> Option<FunctionStatus> {
        vf.is_none().then(|| FunctionStatus { exists: true, driver: self.status() })
    }

    fn port(&mut self, vf: Option<VfIndex>) -> Option<&mut dyn Port> {
        if vf.is_none() { self.device.port() } else { None }
    }

    fn pause(&mut self) {
        self.pause();
    }

    fn resume(&mut self) {
        self.resume(true);
    }

    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        self.save_device(None).map(Some)
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        self.restore_alone(state)
    }
}

#[cfg(test)]
mod tests;
