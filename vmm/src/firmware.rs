//! What firmware expects of a PC, and what a kernel that is booted directly does better without: the ports of
//! configuration space, a timer, and a clock.

mod config_ports;
mod pm_timer;
mod rtc;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::firmware::config_ports::SharedConfigPorts;
use crate::firmware::pm_timer::PmTimer;
use crate::firmware::rtc::Rtc;
use crate::pci_host::bus::Bus;
use crate::vcpu::pio::{Device, PortHandler as _};

/// The saved state of these ports, but for the timer, whose time goes on with the guest's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FirmwareState {
    /// The address register of configuration space (CF8h).
    pub config_address: u32,
    /// The selected register of the clock.
    pub rtc_index: u8,
}

/// The devices on I/O ports of a machine that boots from firmware.
pub(crate) struct FirmwarePorts {
    config: Arc<SharedConfigPorts>,
    timer: Arc<PmTimer>,
    rtc: Arc<Rtc>,
}

impl FirmwarePorts {
    /// Those over `bus`, in their state of power-on.
    pub(crate) fn new(bus: &Arc<Bus>) -> Self {
        let config = Arc::new(SharedConfigPorts::new(Arc::clone(bus)));
        Self { config, timer: Arc::new(PmTimer::new()), rtc: Arc::default() }
    }

    /// Them in their places.
    pub(crate) fn devices(&self) -> [Device; 3] {
        [
            Device { ports: config_ports::PORTS, handler: self.config.clone() },
            Device { ports: pm_timer::PORTS, handler: self.timer.clone() },
            Device { ports: rtc::PORTS, handler: self.rtc.clone() },
        ]
    }

    /// What is to be saved of them.
    pub(crate) fn save(&self) -> FirmwareState {
        FirmwareState { config_address: self.config.address(), rtc_index: self.rtc.index() }
    }

    /// How long the timer has run.
    pub(crate) fn timer(&self) -> Duration {
        self.timer.elapsed()
    }

    /// Brings them to `state`, with a timer that has run for `timer`. Returns false if no guest can have brought them
    /// there.
    #[must_use]
    pub(crate) fn restore(&self, state: &FirmwareState, timer: Duration) -> bool {
        // As a guest's own writes.
        self.config.write(0, &state.config_address.to_le_bytes());
        self.rtc.write(0, &[state.rtc_index]);
        self.timer.set(timer);
        self.save() == *state
    }
}
