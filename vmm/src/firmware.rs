//! What firmware expects of a PC, and what a kernel that is booted directly does better without: the ports of
//! configuration space, a timer, and a clock.

mod config_ports;
mod pm_timer;
mod rtc;

use std::sync::Arc;

use crate::firmware::config_ports::SharedConfigPorts;
use crate::firmware::pm_timer::PmTimer;
use crate::firmware::rtc::Rtc;
use crate::pci_host::bus::Bus;
use crate::vcpu::pio::Device;

/// The devices on I/O ports of a machine that boots from firmware, in their state of power-on.
pub(crate) fn port_devices(bus: &Arc<Bus>) -> Vec<Device> {
    vec![
        Device { ports: config_ports::PORTS, handler: Arc::new(SharedConfigPorts::new(Arc::clone(bus))) },
        Device { ports: pm_timer::PORTS, handler: Arc::new(PmTimer::new()) },
        Device { ports: rtc::PORTS, handler: Arc::new(Rtc::default()) },
    ]
}
