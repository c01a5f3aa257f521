//! Ports of older PCs: those of configuration space, a timer, and a clock. Firmware needs them, and so do kernels
//! without ACPI, ECAM or KVM's clock. A Linux kernel that has all three works better without
//! ([`LegacyHardware`]).

mod config_ports;
mod pm_timer;
mod rtc;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::arch::x86_64::legacy::LegacyHardware;
use crate::exits::{Device, PortHandler as _};
use crate::firmware::config_ports::SharedConfigPorts;
use crate::firmware::pm_timer::PmTimer;
use crate::firmware::rtc::Rtc;
use crate::pci_host::bus::Bus;

/// The saved state of these ports, except the timer, which follows the guest's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FirmwareState {
    /// The address register of configuration space (CF8h); 0 without.
    pub config_address: u32,
    /// The selected register of the clock; 0 without.
    pub rtc_index: u8,
}

/// The saved state of such hardware in a machine that does not boot firmware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LegacyState {
    /// The hardware that the machine has.
    pub hardware: LegacyHardware,
    /// State of its ports.
    pub ports: FirmwareState,
}

/// The port devices of a machine's [`LegacyHardware`].
pub(crate) struct FirmwarePorts {
    config: Option<Arc<SharedConfigPorts>>,
    timer: Option<Arc<PmTimer>>,
    rtc: Option<Arc<Rtc>>,
}

impl FirmwarePorts {
    /// The devices of `hardware` over `bus`, in their state of power-on.
    pub(crate) fn new(bus: &Arc<Bus>, hardware: LegacyHardware) -> Self {
        let config = hardware.config_ports.then(|| Arc::new(SharedConfigPorts::new(Arc::clone(bus))));
        let timer = hardware.pm_timer.then(|| Arc::new(PmTimer::new()));
        Self { config, timer, rtc: hardware.clock.then(Arc::default) }
    }

    /// The devices, each with its ports.
    pub(crate) fn devices(&self) -> impl Iterator<Item = Device> {
        let config = self.config.clone().map(|handler| Device { ports: config_ports::PORTS, handler });
        let timer = self.timer.clone().map(|handler| Device { ports: pm_timer::PORTS, handler });
        let rtc = self.rtc.clone().map(|handler| Device { ports: rtc::PORTS, handler });
        [config, timer, rtc].into_iter().flatten()
    }

    /// State to save.
    pub(crate) fn save(&self) -> FirmwareState {
        FirmwareState {
            config_address: self.config.as_ref().map_or(0, |config| config.address()),
            rtc_index: self.rtc.as_ref().map_or(0, |rtc| rtc.index()),
        }
    }

    /// The time for which the timer has run; zero without.
    pub(crate) fn timer(&self) -> Duration {
        self.timer.as_ref().map_or(Duration::ZERO, |timer| timer.elapsed())
    }

    /// Restores `state`, with a timer that has run for `timer`. Returns false if no guest can have caused it.
    #[must_use]
    pub(crate) fn restore(&self, state: &FirmwareState, timer: Duration) -> bool {
        // Restored like a guest's own writes.
        self.config.iter().for_each(|config| config.write(0, &state.config_address.to_le_bytes()));
        self.rtc.iter().for_each(|rtc| rtc.write(0, &[state.rtc_index]));
        self.timer.iter().for_each(|own| own.set(timer));
        self.save() == *state
    }
}
