//! The device configuration that a function's driver has read, for a restore with another device.

use super::VirtioFunction;
use crate::device::config::{compare, length};
use crate::state::hex_bytes::HexBytes;
use crate::state::{StateError, ToldState};
use crate::{Status, VirtioDevice};

impl<D: VirtioDevice> VirtioFunction<D> {
    /// The configuration and properties that a driver can read of the device now; `None` if there is nothing to read.
    pub(super) fn told(&self) -> Option<ToldState> {
        let config = self.device_config();
        let promises: Vec<_> =
            self.device.promises().into_iter().map(|(option, value)| (option.to_string(), value)).collect();
        if config.is_empty() && promises.is_empty() {
            return None;
        }
        Some(ToldState { generation: self.config_generation(), config: HexBytes(config), promises })
    }

    /// The device configuration.
    fn device_config(&self) -> Vec<u8> {
        let mut config = vec![0; length(self.device.config_fields())];
        self.device_config_read(0, &mut config);
        config
    }

    /// Compares the configuration that the driver has read with the present one, after everything else was restored,
    /// and announces changes. Without a driver, the next one reads everything.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot serve this driver.
    pub(super) fn keep_word(&mut self, told: &ToldState) -> Result<(), StateError> {
        let ToldState { generation, config, promises } = told;
        self.generation = generation.wrapping_sub(self.device.config_generation());
        if self.status() == Status::empty() {
            return Ok(());
        }
        for (option, now) in self.device.promises() {
            // A state of an earlier version may have fewer.
            let then = promises.iter().find(|(told, _)| told == option).map(|(_, then)| then);
            if let Some(then) = then.filter(|then| **then != now) {
                return Err(StateError::Told { what: option.to_string(), then: then.clone(), now });
            }
        }
        let now = self.device_config();
        if compare(self.device.config_fields(), &config.0, &now, self.transport.agreed())? {
            self.generation = self.generation.wrapping_add(1);
            self.device.config_changed();
            self.transport.interrupts().signal_config();
        }
        Ok(())
    }
}
