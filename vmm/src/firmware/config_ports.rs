//! The ports CF8h and CFCh of configuration space, with which firmware probes the machine.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use pci::ConfigPorts;

use crate::exits::PortHandler;
use crate::pci_host::bus::Bus;

/// The ports.
pub(super) const PORTS: Range<u16> = ConfigPorts::BASE..ConfigPorts::BASE + ConfigPorts::LEN;

/// The ports, which all vCPUs share. A guest must serialize the two accesses of a request itself.
pub(super) struct SharedConfigPorts {
    bus: Arc<Bus>,
    /// Never locked during an access to a device.
    ports: Mutex<ConfigPorts>,
}

impl SharedConfigPorts {
    /// The ports of `bus`.
    pub(super) fn new(bus: Arc<Bus>) -> Self {
        Self { bus, ports: Mutex::default() }
    }
}

impl SharedConfigPorts {
    /// The address register.
    pub(super) fn address(&self) -> u32 {
        let mut address = [0; 4];
        self.read(0, &mut address);
        u32::from_le_bytes(address)
    }
}

impl PortHandler for SharedConfigPorts {
    fn read(&self, offset: u16, data: &mut [u8]) {
        let ports = self.ports.lock().clone();
        self.bus.read_by_ports(&ports, offset, data);
    }

    fn write(&self, offset: u16, data: &[u8]) {
        let mut ports = self.ports.lock().clone();
        let before = ports.clone();
        self.bus.write_by_ports(&mut ports, offset, data);
        if ports != before {
            *self.ports.lock() = ports;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_address_is_kept_and_no_device_reads_all_ones() {
        let ports = SharedConfigPorts::new(Arc::new(Bus::new(1, Vec::new())));
        let read = |offset: u16| {
            let mut data = [0; 4];
            ports.read(offset, &mut data);
            u32::from_le_bytes(data)
        };
        assert_eq!(read(0), 0);
        ports.write(0, &0x8000_0000u32.to_le_bytes());
        ports.write(4, &[1, 2, 3, 4]);
        assert_eq!((read(0), read(4)), (0x8000_0000, u32::MAX));
    }

    proptest! {
        #[test]
        fn no_access_panics(
            steps in prop::collection::vec((0..8u16, prop::collection::vec(any::<u8>(), 1..9)), 0..64)
        ) {
            let ports = SharedConfigPorts::new(Arc::new(Bus::new(1, Vec::new())));
            for (offset, mut data) in steps {
                ports.write(offset, &data);
                ports.read(offset, &mut data);
            }
        }
    }
}
