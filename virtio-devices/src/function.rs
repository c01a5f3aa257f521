//! A virtio device as a PCI function: the same type for a plain device, a PF and a VF.

mod config_access;
mod faults;
pub(crate) mod host;
mod layout;
mod resets;
mod run;
mod signals;
mod state;
mod stopped;
mod told;
mod whole_device;

use std::io;
use std::sync::Arc;

use log::warn;
use pci::{
    BarIndex, BarKind, ConfigShape, ConfigSpace, Dword, DwordWrite, Effects, Function, Identity, Reach, Rid, Role,
    ShapeError, WindowId,
};
use virtio_bindings::virtio_config::VIRTIO_F_ACCESS_PLATFORM;

use self::layout::RegisterBlock;
pub(crate) use self::layout::{Layout, MEMORY_BAR, REGISTERS_BAR, Spacing};
use self::run::Run;
use crate::os::thread::Thread;
use crate::transport::{Change, Transport};
use crate::{
    ConnectError, DmaSpace, DriverLog, IommuAttachment, NeedsResetObserver, NewBackend, Outcome, QueueError, ResetBy,
    Start, Status, VirtioDevice,
};

/// The Vendor ID of virtio devices (`virtio 1.4 §4.1.2`).
const VENDOR: u16 = 0x1af4;
/// The Device ID of the device type 0.
const FIRST_DEVICE: u16 = 0x1040;
/// A device without a legacy interface has a Revision ID of 1 or more.
const REVISION: u8 = 1;

/// The PCI Device ID of a virtio device type.
pub(crate) fn device_id(device_type: u16) -> u16 {
    FIRST_DEVICE.saturating_add(device_type)
}

/// Reason why a device cannot be made a function.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FunctionError {
    /// Impossible queues.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// Impossible configuration space.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// A virtio device, its transport and its configuration space.
///
/// The queues run while the driver has set DRIVER_OK (without FAILED or DEVICE_NEEDS_RESET), Bus Master Enable is set,
/// the function is in D0, and the host has not paused it. A stop without a reset keeps the queues and their positions.
pub struct VirtioFunction<D> {
    rid: Rid,
    layout: Layout,
    config: ConfigSpace,
    transport: Transport,
    device: D,
    memory: DmaSpace,
    /// The function's IOMMU endpoint, if it is behind an IOMMU.
    attachment: Option<IommuAttachment>,
    /// The queues, from their first start until a reset.
    run: Option<Run>,
    /// The offset of config_generation, as the driver reads it, from the device's: a restored driver continues from the
    /// value that it has read.
    generation: u8,
    /// The host keeps the queues stopped.
    paused: bool,
    start_failures: u64,
    /// The cause of the last reset while a driver used the function.
    reset_by: ResetBy,
    /// The number of conventional resets.
    conventional_resets: u64,
    /// The cause of the last disabling of the VFs, of a PF.
    vfs_disabled_by: ResetBy,
    /// The log of the driver's actions, if they are logged.
    log: Option<Arc<DriverLog>>,
    /// Error of the host's last attempt to resume the function.
    not_resumed: Option<io::Error>,
}

impl<D: VirtioDevice> VirtioFunction<D> {
    /// Creates a function that is neither a PF nor a VF, at `rid`.
    ///
    /// # Errors
    ///
    /// Fails if the device's queues are invalid.
    pub fn plain(device: D, rid: Rid, memory: impl Into<DmaSpace>) -> Result<Self, FunctionError> {
        let spacing = Spacing::of([&device]);
        Self::new(device, rid, (Role::Plain, spacing), memory.into())
    }

    /// Creates a function with a role, whose doorbells have the distance `spacing`. The PF decodes the BARs of a VF.
    pub(crate) fn new(
        device: D,
        rid: Rid,
        (role, spacing): (Role, Spacing),
        memory: DmaSpace,
    ) -> Result<Self, FunctionError> {
        let queue_sizes = device.queue_sizes();
        let count = u16::try_from(queue_sizes.len()).map_err(|_| QueueError::Count(queue_sizes.len()))?;
        let memory_len = device.memory().map_or(0, |memory| memory.len());
        let layout = Layout::new(count, spacing).with_memory(memory_len);
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
        let config = ConfigSpace::new(ConfigShape {
            bars: layout.bars(),
            vendor: layout.capabilities(),
            msix: Some(layout.msix()),
            ..ConfigShape::new(identity, role)
        })?;
        let (run, paused, start_failures, not_resumed) = (None, false, 0, None);
        let generation = 0;
        let attachment = None;
        Ok(Self {
            rid,
            layout,
            config,
            transport,
            device,
            memory,
            attachment,
            run,
            generation,
            paused,
            start_failures,
            reset_by: ResetBy::default(),
            conventional_resets: 0,
            vfs_disabled_by: ResetBy::default(),
            log: None,
            not_resumed,
        })
    }

    /// The BARs that a function of this device decodes.
    pub(crate) fn bars(device: &D, spacing: Spacing) -> Result<Vec<(BarIndex, BarKind)>, QueueError> {
        let count = device.queue_sizes().len();
        Ok(Layout::new(u16::try_from(count).map_err(|_| QueueError::Count(count))?, spacing).bars())
    }

    /// The function behind an IOMMU.
    #[must_use]
    pub fn with_iommu(mut self, attachment: IommuAttachment) -> Self {
        self.attach_iommu(attachment);
        self
    }

    /// Puts the function behind an IOMMU: a driver must use I/O addresses, even while they are not translated (`virtio
    /// 1.4 §6.1`, VIRTIO_F_ACCESS_PLATFORM). Must be called before any access.
    pub(crate) fn attach_iommu(&mut self, attachment: IommuAttachment) {
        self.transport.require(VIRTIO_F_ACCESS_PLATFORM);
        let endpoint = Arc::clone(attachment.endpoint());
        self.memory = DmaSpace::translated(self.memory.memory().clone(), endpoint);
        self.attachment = Some(attachment);
    }

    /// The routing ID.
    pub fn rid(&self) -> Rid {
        self.rid
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, for changes by the host.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// The device status, as the driver reads it.
    pub fn status(&self) -> Status {
        self.transport.status()
    }

    /// True if the queues run.
    pub fn is_running(&self) -> bool {
        self.run.as_ref().is_some_and(Run::is_running)
    }

    /// Number of failed starts of the queues, because the host had no thread or file descriptor.
    pub fn start_failures(&self) -> u64 {
        self.start_failures
    }

    /// Makes a change that may start or stop the queues; see [`Function`] for `powered`.
    fn change(&mut self, powered: bool, change: impl FnOnce(&mut Self) -> Outcome) -> Outcome {
        let had_queues = self.run.is_some();
        let mut outcome = change(self);
        self.note_disabled(outcome.effects);
        if let Some(kind) = outcome.effects.reset.take() {
            self.note_reset(kind);
            self.transport.reset();
            // No driver is left that relies on the generation from before a restore.
            self.generation = 0;
            outcome.stopping.extend(self.reset_device());
            if kind == pci::ResetKind::Conventional {
                self.conventional_resets += 1;
                self.device.end_guest_settings();
            }
        }
        if outcome.effects.queues {
            outcome.stopping.extend(self.settle(powered));
        }
        if self.config.is_vf() && !had_queues && self.run.is_none() {
            // A VF without queues needs nothing from its host. Its driver makes a dozen writes before it has any, and
            // each would cost an evaluation of its effects.
            outcome.effects.messages = false;
            outcome.effects.queues = false;
        }
        outcome.within(Reach::Function(self.rid))
    }

    /// Reads `data.len()` bytes at `offset` of `bar`. Outside of the BARs it reads all-ones, between their structures
    /// 0.
    fn bar_load(&self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        let Some(place) = self.layout.locate(bar, offset, data.len()) else { return data.fill(0xff) };
        data.fill(0);
        match place {
            RegisterBlock::Common(offset) => self.transport.read(offset, data, self.config_generation()),
            RegisterBlock::Isr => {
                if let [isr] = data {
                    *isr = self.transport.interrupts().take_isr();
                }
            }
            RegisterBlock::DeviceConfig(offset) => self.device_config_read(offset, data),
            RegisterBlock::Msix(offset) => {
                // An eventfd may still hold a signal that was sent.
                let raised = |vector| self.transport.interrupts().is_signalled(vector);
                if let Some(msix) = self.config.msix() {
                    msix.bar_read(bar, offset, data, self.may_signal(), raised);
                }
            }
            RegisterBlock::Doorbell(_) | RegisterBlock::Hole => {}
        }
    }

    /// Reads the device configuration.
    fn device_config_read(&self, offset: u64, data: &mut [u8]) {
        if self.device.memory().is_some() {
            self.device.placed_config_read(self.memory_start(), offset, data);
        } else {
            self.device.config_read(offset, data);
        }
    }

    /// config_generation, as the driver reads it.
    fn config_generation(&self) -> u8 {
        self.device.config_generation().wrapping_add(self.generation)
    }

    /// Guest address of the device's memory; 0 while it is not mapped.
    fn memory_start(&self) -> u64 {
        let mut windows = Vec::new();
        self.config.windows(&mut windows);
        let window = windows.iter().find(|window| window.id == WindowId::Bar(MEMORY_BAR));
        window.map_or(0, |window| window.base)
    }

    /// Writes `data` at `offset` of `bar`.
    fn bar_store(&mut self, bar: BarIndex, offset: u64, data: &[u8]) -> Outcome {
        match self.layout.locate(bar, offset, data.len()) {
            Some(RegisterBlock::Common(offset)) => match self.common_write(offset, data) {
                Change::None => Outcome::none(),
                Change::Vectors => {
                    self.run.iter().for_each(Run::wake);
                    Effects::MESSAGES.into()
                }
                // The first start of its queues gives the function messages to send.
                Change::Status => Effects::QUEUES.and(Effects::MESSAGES).into(),
                Change::Reset => {
                    Outcome { stopping: self.reset_device(), ..Effects::QUEUES.and(Effects::MESSAGES).into() }
                }
            },
            Some(RegisterBlock::DeviceConfig(offset)) => {
                self.device.config_write(offset, data);
                Outcome { stopping: self.device.config_written(), ..Outcome::none() }
            }
            // Usually an ioeventfd takes the write; one that comes before the ioeventfd is registered must not be lost.
            Some(RegisterBlock::Doorbell(queue)) if !data.is_empty() => {
                if let Some(run) = self.run.as_ref().filter(|run| run.is_running())
                    && !self.device.doorbell_rung(queue)
                {
                    run.ring(queue);
                }
                Outcome::none()
            }
            Some(RegisterBlock::Msix(offset)) => {
                self.config.msix_write(bar, offset, data).unwrap_or(Effects::NONE).into()
            }
            _ => Outcome::none(),
        }
    }

    /// Stops the queues, discards their positions, and resets the device.
    #[must_use]
    fn reset_device(&mut self) -> Vec<Thread> {
        self.log_stop(self.is_running(), |_| "a reset".to_string());
        let stopping = self.run.take().map(|mut run| run.stop()).unwrap_or_default();
        self.device.reset();
        stopping
    }

    /// As [`Lifecycle::pause`], for this function alone.
    #[must_use]
    pub(crate) fn hold(&mut self) -> Vec<Thread> {
        self.paused = true;
        self.settle(false)
    }

    /// As [`Lifecycle::resume`], for this function alone.
    #[must_use]
    pub(crate) fn release(&mut self, powered: bool) -> Vec<Thread> {
        self.paused = false;
        self.not_resumed = None;
        if !self.is_to_run(powered) {
            return self.settle(powered);
        }
        if let Err(error) = self.try_start() {
            // The driver is not at fault, and need not be notified: the host may try again.
            self.paused = true;
            self.not_resumed = Some(error);
        }
        Vec::new()
    }

    /// As [`Lifecycle::connect`], for this function alone.
    pub(crate) fn connect(&mut self, new: &mut NewBackend) -> Result<(), ConnectError> {
        if self.is_running() {
            return Err(ConnectError::Running);
        }
        self.device.connect(new, self.transport.agreed())?;
        self.transport.offer(self.device.features());
        Ok(())
    }

    /// The error because of which the last [`Self::release`] left the function paused, if any.
    pub(crate) fn take_not_resumed(&mut self) -> Option<io::Error> {
        self.not_resumed.take()
    }

    /// Calls `observer` when the function asks its driver for a reset.
    pub(crate) fn observe_needs_reset(&self, observer: &Arc<NeedsResetObserver>) {
        self.transport.interrupts().observe_needs_reset(observer);
    }

    /// True if the queues should run, according to the registers, the host and `powered`.
    fn is_to_run(&self, powered: bool) -> bool {
        self.transport.ready() && self.config.bus_master() && powered && !self.paused
    }

    /// Starts or stops the queues according to the registers, the host and `powered`.
    #[must_use]
    fn settle(&mut self, powered: bool) -> Vec<Thread> {
        if self.is_to_run(powered) {
            self.start();
            return Vec::new();
        }
        self.log_stop(self.is_running(), |this| this.stop_reason(powered));
        self.run.as_mut().map(Run::stop).unwrap_or_default()
    }

    fn try_start(&mut self) -> io::Result<()> {
        let transport = &self.transport;
        let run = self.run.get_or_insert_with(|| Run::new(transport.queues()));
        if run.is_running() {
            return Ok(());
        }
        let start = Start {
            memory: self.memory.clone(),
            features: transport.features(),
            queues: run.queues().to_vec(),
            interrupts: Arc::clone(transport.interrupts()),
            log: self.log.clone(),
        };
        run.start(&mut self.device, start)?;
        self.log_run();
        Ok(())
    }

    fn start(&mut self) {
        if let Err(error) = self.try_start() {
            self.transport.interrupts().ask_for_reset();
            self.start_failures = self.start_failures.saturating_add(1);
            // A guest can retry at will; the log grows with the logarithm of the attempts.
            if self.start_failures.is_power_of_two() {
                let times = self.start_failures;
                warn!("{}: cannot start its queues ({times} so far): {error}; its driver must reset it", self.rid);
            }
        }
    }
}

impl<D: VirtioDevice> Function for VirtioFunction<D> {
    type Stopping = Thread;

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn changed(&mut self, effects: Effects, powered: bool) -> Outcome {
        self.change(powered, |_| effects.into())
    }

    fn config_read(&self, reg: Dword) -> u32 {
        self.config_access_read(reg).unwrap_or_else(|| self.config.read(reg))
    }

    fn config_write(&mut self, reg: Dword, write: DwordWrite, powered: bool) -> Outcome {
        self.change(powered, |this| {
            let registers = Outcome::from(this.config.write(reg, write));
            registers.and(this.config_access_write(reg, write))
        })
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        self.bar_load(bar, offset, data);
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8], powered: bool) -> Outcome {
        self.change(powered, |this| this.bar_store(bar, offset, data))
    }
}

#[cfg(test)]
mod tests;
