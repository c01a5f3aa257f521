//! pvpanic: a PCI device through which a guest reports that it panicked.
//!
//! The only register, the first byte of BAR 0, reads as the set of supported reports; a write is a report. Linux's
//! driver is pvpanic-pci; QEMU documents the device (`docs/specs/pvpanic`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use pci::spec::ALL_ONES;
use pci::{
    BarIndex, BarKind, ConfigShape, ConfigSpace, Device, Dword, DwordWrite, Identity, ResetKind, Rid, Role, ShapeError,
    Window, WindowId,
};
use virtio_devices::{
    CounterText, DeviceSpecific, DeviceState, FunctionState, Inspect, Lifecycle, Outcome, STATE_VERSION, Signals,
    StateError, Thread, TransportState,
};

use crate::telemetry::events::{Events, Source, Tell, Watched};

/// The smallest memory BAR. Cloud Hypervisor's has 2 bytes, less than a BAR can encode.
const BAR: BarKind = BarKind::Memory32 { size: 128 };
/// The IDs and the class (system peripheral) that drivers look for.
const IDENTITY: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0011,
    revision: 1,
    class: [0x08, 0x80, 0x00],
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
};
/// Reports of a guest: the bit in the register, and the name in the event.
const REPORTS: [(u8, &str); 2] = [(1 << 0, "panic"), (1 << 1, "crash_loaded")];
/// Descriptions of the counters of the reports, in the same order.
pub(crate) const TEXTS: [CounterText; REPORTS.len()] = [
    text("panics", "Panics that the kernel of the guest reported."),
    text("crashes_loaded", "Panics after which the guest started its crash kernel, as it reported."),
];

const fn text(name: &'static str, text: &'static str) -> CounterText {
    CounterText { name, unit: "reports", is_loss: false, text }
}

/// Reports that the guest has made.
///
/// A guest can report again and again, so a report only sets a flag, and the thread that writes events reports it when
/// it runs: two reports of the same kind before that become one event.
#[derive(Default)]
pub(crate) struct Reports {
    kinds: [Kind; REPORTS.len()],
    events: Events,
}

#[derive(Default)]
struct Kind {
    count: AtomicU64,
    untold: AtomicBool,
}

impl Reports {
    fn begin(events: &Events) -> Arc<Self> {
        let reports = Arc::new(Self { kinds: Default::default(), events: events.clone() });
        let watched: Arc<dyn Watched> = reports.clone();
        let watched: Weak<dyn Watched> = Arc::downgrade(&watched);
        events.watch(watched);
        reports
    }

    /// Records the reports in a write to the register.
    fn note(&self, written: u8) {
        for ((bit, name), kind) in REPORTS.iter().zip(&self.kinds) {
            if written & bit == 0 {
                continue;
            }
            let count = kind.count.fetch_add(1, Ordering::Relaxed) + 1;
            if count.is_power_of_two() {
                log::warn!("the guest reports: {name} (number {count})");
            }
            if !kind.untold.swap(true, Ordering::AcqRel) {
                self.events.look();
            }
        }
    }

    /// Number of reports of each kind.
    pub(crate) fn counters(&self) -> Vec<(&'static str, u64)> {
        TEXTS.iter().zip(&self.kinds).map(|(text, kind)| (text.name, kind.count.load(Ordering::Relaxed))).collect()
    }
}

impl Watched for Reports {
    fn look(&self, tell: Tell<'_>) {
        for ((_, name), kind) in REPORTS.iter().zip(&self.kinds) {
            if kind.untold.swap(false, Ordering::AcqRel) {
                tell(Source::Guest, "panic", &[("event", name)]);
            }
        }
    }
}

impl Drop for Reports {
    /// Reports the rest: a guest that has panicked may be removed before the event thread runs.
    fn drop(&mut self) {
        let events = self.events.clone();
        self.look(&mut |source, event, properties| events.tell(source, event, properties));
    }
}

/// A pvpanic device.
pub(crate) struct Pvpanic {
    rid: Rid,
    config: ConfigSpace,
    reports: Arc<Reports>,
}

impl Pvpanic {
    /// A device at `rid` that reports to `events`.
    ///
    /// # Errors
    ///
    /// Fails if no function can look like this.
    pub(crate) fn new(rid: Rid, events: &Events) -> Result<Self, ShapeError> {
        let [bar, ..] = BarIndex::ALL;
        let shape = ConfigShape { bars: vec![(bar, BAR)], ..ConfigShape::new(IDENTITY, Role::Plain) };
        Ok(Self { rid, config: ConfigSpace::new(shape)?, reports: Reports::begin(events) })
    }

    /// Reports that the guest has made.
    pub(crate) const fn reports(&self) -> &Arc<Reports> {
        &self.reports
    }
}

impl Device for Pvpanic {
    type Stopping = Thread;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        if rid == self.rid { self.config.read(reg) } else { ALL_ONES }
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome {
        if rid == self.rid { self.config.write(reg, write).into() } else { Outcome::none() }
    }

    fn mmio_read(&mut self, _window: WindowId, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (0, Some(register)) = (offset, data.first_mut()) {
            *register = REPORTS.iter().fold(0, |known, (bit, ..)| known | bit);
        }
    }

    fn mmio_write(&mut self, _window: WindowId, offset: u64, data: &[u8]) -> Outcome {
        if let (0, Some(written)) = (offset, data.first()) {
            self.reports.note(*written);
        }
        Outcome::none()
    }

    fn may_send(&self, rid: Rid) -> bool {
        rid == self.rid && self.config.bus_master()
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.config.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome {
        self.config.reset(kind).into()
    }
}

/// The device has no queues and sends no messages.
impl Signals for Pvpanic {}

impl Inspect for Pvpanic {}

impl Pvpanic {
    /// The state of such a device with this configuration space, which is all of its changing state.
    fn state(&self) -> DeviceState {
        let transport = TransportState::unused();
        let function = FunctionState {
            config: self.config.save(),
            transport,
            positions: None,
            device: DeviceSpecific::PowerOn,
            told: None,
        };
        // No virtio device has the type 0.
        DeviceState { version: STATE_VERSION, rid: self.rid.to_bits(), device_type: 0, function, vfs: None }
    }
}

impl Lifecycle for Pvpanic {
    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        Ok(Some(self.state()))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        let _ = self.config.reset(ResetKind::Conventional);
        if state.version != STATE_VERSION {
            return Err(StateError::Version(state.version));
        }
        let mut same = self.state();
        same.function.config.clone_from(&state.function.config);
        if same != *state {
            return Err(StateError::Shape("kinds of device"));
        }
        Ok(self.config.restore(&state.function.config)?)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use pci::spec::{command, header};
    use pci::{Access, Topology};

    use super::*;
    use crate::telemetry::events::EventStream;
    use crate::telemetry::monitor::EventMonitor;

    const WINDOW: WindowId = WindowId::Bar(BarIndex::ALL[0]);

    fn device(events: &Events) -> Pvpanic {
        let placement = Topology::<()>::new(127).place(Some(3), 0).unwrap();
        Pvpanic::new(placement.rid, events).unwrap()
    }

    fn write(device: &mut Pvpanic, offset: u16, value: u32) {
        let access = Access::decode(offset.into(), 4).unwrap();
        let _ = Device::config_write(device, device.rid, access.dword(), access.write(&value.to_le_bytes()));
    }

    /// The events while `report` runs: at most one for each report.
    fn told(report: impl FnOnce(&mut Pvpanic)) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let output = EventMonitor::Path(path.clone()).open().unwrap();
        let (stream, events) = EventStream::start(output, Instant::now()).unwrap();
        let mut device = device(&events);
        report(&mut device);
        drop(device);
        drop(stream);
        let text = std::fs::read_to_string(path).unwrap();
        let told = serde_json::Deserializer::from_str(&text).into_iter::<serde_json::Value>();
        let line = |event: serde_json::Value| {
            format!("{}:{} {}", event["source"], event["event"], event["properties"]).replace('"', "")
        };
        told.map(|event| line(event.unwrap())).collect()
    }

    #[test]
    fn a_driver_finds_the_device_and_what_it_can_report() {
        let mut device = device(&Events::default());
        let read = |device: &Pvpanic, offset| Device::config_read(device, device.rid, Dword::containing(offset));
        assert_eq!(read(&device, header::ID), 0x0011_1b36);
        write(&mut device, header::BAR0, u32::MAX);
        assert_eq!(read(&device, header::BAR0), 0xffff_ff80);
        write(&mut device, header::BAR0, 0xe000_0000);
        let mut windows = Vec::new();
        device.windows(&mut windows);
        assert!(windows.is_empty());
        write(&mut device, header::COMMAND_STATUS, command::MEMORY_SPACE.into());
        device.windows(&mut windows);
        assert_eq!((windows[0].id, windows[0].base, windows[0].len), (WINDOW, 0xe000_0000, 128));
        for (offset, expected) in [(0, [0b11, 0]), (1, [0; 2]), (127, [0; 2]), (u64::MAX, [0; 2])] {
            let mut data = [0xff; 2];
            device.mmio_read(WINDOW, offset, &mut data);
            assert_eq!(data, expected);
        }
    }

    #[test]
    fn a_report_becomes_an_event() {
        let write =
            |device: &mut Pvpanic, offset, data: &[u8]| assert!(device.mmio_write(WINDOW, offset, data).is_none());
        assert_eq!(told(|device| write(device, 0, &[1])), ["guest:panic {event:panic}"]);
        assert_eq!(told(|device| write(device, 0, &[2, 1])), ["guest:panic {event:crash_loaded}"]);
        let both = ["guest:panic {event:panic}", "guest:panic {event:crash_loaded}"];
        assert_eq!(told(|device| write(device, 0, &[0xff])), both);
        let nothing = told(|device| {
            write(device, 0, &[0xfc]);
            write(device, 0, &[]);
            write(device, 1, &[1]);
        });
        assert_eq!(nothing, [""; 0]);
    }

    #[test]
    fn a_guest_that_reports_without_end_is_counted() {
        let mut count = Vec::new();
        let told = told(|device| {
            (0..10_000).for_each(|_| drop(device.mmio_write(WINDOW, 0, &[1])));
            count = device.reports().counters();
        });
        assert!(!told.is_empty() && told.len() < 10_000);
        assert_eq!(count, [("panics", 10_000), ("crashes_loaded", 0)]);
    }

    #[test]
    fn its_registers_are_its_state() {
        let mut device = device(&Events::default());
        write(&mut device, header::BAR0, 0xe000_0000);
        write(&mut device, header::COMMAND_STATUS, command::MEMORY_SPACE.into());
        let state = device.save().unwrap().unwrap();
        let image = |device: &Pvpanic| Dword::all().map(|reg| device.config.read(reg)).collect::<Vec<_>>();
        let before = image(&device);
        let _ = Device::reset(&mut device, ResetKind::Conventional);
        assert_ne!(image(&device), before);
        device.restore(&state).unwrap();
        assert_eq!(image(&device), before);
        for other in [
            DeviceState { version: 0, ..state.clone() },
            DeviceState { rid: 0, ..state.clone() },
            DeviceState { device_type: 1, ..state.clone() },
        ] {
            assert!(device.restore(&other).is_err());
        }
        let mut other = state.clone();
        other.function.transport.status = 1;
        assert!(device.restore(&other).is_err());
        let mut other = state;
        other.function.config.bars[0] = 1;
        assert!(device.restore(&other).is_err());
    }
}
