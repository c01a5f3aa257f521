//! I/O ports: the serial port, the ACPI sleep and reset registers, the generic event device, the hot-plug registers of
//! slots, vCPUs and memory, the NMI status port, and the keyboard controller's reset line, which Linux uses with
//! `reboot=k`.
//!
//! Further devices have their own ports, such as those that firmware needs. All other ports read as all-ones. Without
//! 0xcf8 and 0xcfc, Linux uses ECAM for all configuration accesses.

use std::sync::Arc;

use crate::acpi::ged::{self, GenericEventDevice};
use crate::acpi::{memory_hotplug, vcpu_hotplug};
use crate::arch::x86_64::layout::{
    EVENT_PORT, KEYBOARD_COMMAND_PORT, KEYBOARD_RESET, MEMORY_PORT, NMI_STATUS, NMI_STATUS_PORT, PROCESSOR_PORT,
    RESET_PORT, RESET_VALUE, S5_SLEEP_TYPE, SERIAL_PORT, SLEEP_CONTROL_PORT, SLEEP_STATUS_PORT, SLOTS_PORT,
};
use crate::exits::{Device, PortHandler};
use crate::serial::SerialPort;

/// Number of ports of the serial port.
const SERIAL_PORTS: u16 = 8;
/// Last port of the serial port.
const SERIAL_LAST: u16 = SERIAL_PORT + SERIAL_PORTS - 1;
/// Last port of the slots of all segments.
const SLOTS_LAST: u16 = SLOTS_PORT + ged::ALL_SLOT_PORTS - 1;
/// Last port of the vCPU hot-plug registers.
const PROCESSOR_LAST: u16 = PROCESSOR_PORT + vcpu_hotplug::PORTS - 1;
/// Last port of the memory hot-plug registers.
const MEMORY_LAST: u16 = MEMORY_PORT + memory_hotplug::PORTS - 1;
/// SLP_EN of the sleep control register, which starts the transition (`ACPI 6.5 §4.8.3.7`).
const SLEEP_ENABLE: u8 = 1 << 5;

/// Request of the guest to power off or reset, through a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PowerRequest {
    /// Power off.
    PowerOff,
    /// Reset.
    Reset,
}

/// The I/O ports of a VM.
pub struct IoPorts {
    serial: Option<Arc<SerialPort>>,
    ged: Arc<GenericEventDevice>,
    devices: Vec<Device>,
}

impl IoPorts {
    /// Creates the ports of a VM with or without a serial port.
    pub fn new(serial: Option<Arc<SerialPort>>, ged: Arc<GenericEventDevice>) -> Self {
        Self { serial, ged, devices: Vec::new() }
    }

    /// Adds devices with their own ports.
    #[must_use]
    pub fn with_devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices.extend(devices);
        self
    }

    /// Returns the device with `port`, and the port's offset in it.
    fn device(&self, port: u16) -> Option<(&dyn PortHandler, u16)> {
        let device = self.devices.iter().find(|device| device.ports.contains(&port))?;
        Some((device.handler.as_ref(), port - device.ports.start))
    }

    /// Reads `data.len()` 8-bit ports from `port` on in one access.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        if let Some((device, offset)) = self.device(port) {
            return device.read(offset, data);
        }
        for (byte, port) in data.iter_mut().zip(ports_from(port)) {
            *byte = self.read_byte(port);
        }
    }

    /// Writes `data.len()` 8-bit ports from `port` on in one access.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<PowerRequest> {
        if let Some((device, offset)) = self.device(port) {
            device.write(offset, data);
            return None;
        }
        data.iter().zip(ports_from(port)).filter_map(|(byte, port)| self.write_byte(port, *byte)).last()
    }

    fn read_byte(&self, port: u16) -> u8 {
        match (port, &self.serial) {
            (SERIAL_PORT..=SERIAL_LAST, Some(serial)) => serial.read((port - SERIAL_PORT) as u8),
            (SLEEP_CONTROL_PORT | SLEEP_STATUS_PORT | RESET_PORT, _) => 0,
            (EVENT_PORT, _) => self.ged.take_events(),
            (SLOTS_PORT..=SLOTS_LAST, _) => self.ged.read_slots(port - SLOTS_PORT),
            (PROCESSOR_PORT..=PROCESSOR_LAST, _) => self.ged.read_vcpus(port - PROCESSOR_PORT),
            (MEMORY_PORT..=MEMORY_LAST, _) => self.ged.read_memory(port - MEMORY_PORT),
            (NMI_STATUS_PORT, _) => NMI_STATUS,
            _ => 0xff,
        }
    }

    fn write_byte(&self, port: u16, value: u8) -> Option<PowerRequest> {
        match (port, &self.serial) {
            (SERIAL_PORT..=SERIAL_LAST, Some(serial)) => {
                serial.write((port - SERIAL_PORT) as u8, value);
                None
            }
            (SLOTS_PORT..=SLOTS_LAST, _) => {
                self.ged.write_slots(port - SLOTS_PORT, value);
                None
            }
            (PROCESSOR_PORT..=PROCESSOR_LAST, _) => {
                self.ged.write_vcpus(port - PROCESSOR_PORT, value);
                None
            }
            (SLEEP_CONTROL_PORT, _) => {
                let off = value & SLEEP_ENABLE != 0 && value >> 2 & 7 == S5_SLEEP_TYPE;
                off.then_some(PowerRequest::PowerOff)
            }
            (RESET_PORT, _) => (value == RESET_VALUE).then_some(PowerRequest::Reset),
            (KEYBOARD_COMMAND_PORT, _) => (value == KEYBOARD_RESET).then_some(PowerRequest::Reset),
            _ => None,
        }
    }
}

/// Yields `first` and the ports after it, wrapping around.
fn ports_from(first: u16) -> impl Iterator<Item = u16> {
    (0..).map(move |offset| first.wrapping_add(offset))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::x86_64::layout;
    use crate::config::{ConsoleConfig, ConsoleMode};
    use crate::serial::SerialConsole;
    use vmm_sys_util::eventfd::EventFd;

    fn ports(serial: Option<Arc<SerialPort>>) -> IoPorts {
        IoPorts::new(serial, Arc::new(GenericEventDevice::new(Arc::new(EventFd::new(0).unwrap())).unwrap()))
    }

    #[test]
    fn a_port_that_does_not_exist_reads_all_ones_and_ignores_writes() {
        let ports = ports(None);
        for port in [0, 0x62, 0x3f8, 0xcf8, 0xcfc, 0xaffc, 0xb0a0, 0xffff] {
            let mut data = [0; 4];
            ports.read(port, &mut data);
            assert_eq!(data, [0xff; 4], "{port:#x}");
            assert_eq!(ports.write(port, &[0xff; 4]), None, "{port:#x}");
        }
    }

    #[test]
    fn a_port_that_answers_is_not_free() {
        let console = SerialConsole::open(&ConsoleConfig::new(ConsoleMode::Null)).unwrap().unwrap();
        let ports = ports(Some(Arc::clone(console.port())));
        for port in 0..=u16::MAX {
            let mut data = [0];
            ports.read(port, &mut data);
            assert!(data == [0xff] || layout::is_device_port(port), "{port:#x}");
        }
    }

    /// Linux takes all-ones for a PCI bus error, and an NMI without such a cause for a request to panic
    /// (`kernel.unknown_nmi_panic`).
    #[test]
    fn an_nmi_is_not_an_error() {
        let ports = ports(None);
        for written in [0, 0xff] {
            assert_eq!(ports.write(0x61, &[written]), None);
            let mut data = [0xff];
            ports.read(0x61, &mut data);
            assert_eq!(data, [0x20]);
        }
    }

    #[test]
    fn only_s5_with_sleep_enable_switches_off() {
        let ports = ports(None);
        for value in 0..=255 {
            let off = value & 0x3c == 0x34;
            assert_eq!(ports.write(0x600, &[value]), off.then_some(PowerRequest::PowerOff), "{value:#x}");
        }
    }

    #[test]
    fn only_the_reset_value_resets() {
        let ports = ports(None);
        assert_eq!(ports.write(0x602, &[0]), None);
        assert_eq!(ports.write(0x602, &[1]), Some(PowerRequest::Reset));
        assert_eq!(ports.write(0x64, &[0xd1]), None);
        assert_eq!(ports.write(0x64, &[0xfe]), Some(PowerRequest::Reset));
    }

    /// Records writes with their first port's offset.
    #[derive(Default)]
    struct Memory(parking_lot::Mutex<Vec<(u16, Vec<u8>)>>);

    impl PortHandler for Memory {
        fn read(&self, offset: u16, data: &mut [u8]) {
            data.fill(offset as u8);
        }

        fn write(&self, offset: u16, data: &[u8]) {
            self.0.lock().push((offset, data.to_vec()));
        }
    }

    #[test]
    fn access_to_a_device_with_its_own_ports_arrives_in_one_piece() {
        let memory = Arc::new(Memory::default());
        let ports = ports(None).with_devices([Device { ports: 0x70..0x74, handler: memory.clone() }]);
        assert_eq!(ports.write(0x72, &[1, 2, 3, 4]), None);
        assert_eq!(ports.write(0x74, &[5]), None);
        assert_eq!(*memory.0.lock(), [(2, vec![1, 2, 3, 4])]);
        let mut data = [0; 2];
        ports.read(0x73, &mut data);
        assert_eq!(data, [3, 3]);
        ports.read(0x6f, &mut data);
        assert_eq!(data, [0xff, 0xff]);
    }

    #[test]
    fn a_wide_access_is_one_of_each_port() {
        let console = SerialConsole::open(&ConsoleConfig::new(ConsoleMode::Null)).unwrap().unwrap();
        let ports = ports(Some(Arc::clone(console.port())));
        assert_eq!(ports.write(0x3fe, &[0, 0x5a]), None);
        let mut data = [0; 2];
        ports.read(0x3ff, &mut data);
        assert_eq!(data, [0x5a, 0xff]);
    }
}
