//! Lines of the log about a driver's writes to the common configuration.

use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};

use super::features::has;
use super::register::Register;
use super::{QueueRegisters, Status, Transport, lower};

impl Transport {
    /// Calls `log` with the outcome of the write of `data` at `offset`, if it concerns the device status, the features
    /// or a queue. The status was `before`.
    pub(crate) fn log_write(&self, before: Status, offset: u64, data: &[u8], log: &mut dyn FnMut(&dyn Fn() -> String)) {
        match (Register::decode(offset, data.len()), data) {
            (Some(Register::DeviceStatus), [written]) => self.log_status(before, *written, log),
            (Some(Register::QueueEnable), [1, 0]) => log(&|| self.queue_line()),
            (Some(Register::QueueSize), &[low, high]) => {
                self.size_refusal(u16::from_le_bytes([low, high])).iter().for_each(|line| log(&|| line.clone()));
            }
            (Some(Register::ConfigMsixVector), &[low, high]) => {
                let refusal = self.vector_refusal(None, u16::from_le_bytes([low, high]));
                refusal.iter().for_each(|line| log(&|| line.clone()));
            }
            (Some(Register::QueueMsixVector), &[low, high]) => {
                let refusal = self.vector_refusal(Some(self.queue_select), u16::from_le_bytes([low, high]));
                refusal.iter().for_each(|line| log(&|| line.clone()));
            }
            (None, _) => log(&|| width_refusal(offset, data.len())),
            _ => {}
        }
    }

    fn log_status(&self, before: Status, written: u8, log: &mut dyn FnMut(&dyn Fn() -> String)) {
        let now = self.status();
        if written & Status::FEATURES_OK.bits() != 0 && !before.contains(Status::FEATURES_OK) {
            log(&|| self.features_line());
        }
        let refused = written & Status::DRIVER_OK.bits() != 0 && !now.contains(Status::DRIVER_OK);
        if refused {
            log(&|| "driver status: DRIVER_OK refused: FEATURES_OK is not set".to_string());
        }
        if now != before {
            log(&|| format!("driver status {:#x}: {}", now.bits(), names(now)));
        }
    }

    /// The line about the features, which the driver has just chosen.
    fn features_line(&self) -> String {
        let (chosen, offered) = (self.driver_features, self.offered);
        if self.status().contains(Status::FEATURES_OK) {
            let unmet: Vec<_> = self.unmet(false).map(|requirement| requirement.text).collect();
            let unmet = if unmet.is_empty() { String::new() } else { format!(", although {}", unmet.join(", ")) };
            return format!("features {:#x} of {offered:#x} negotiated{unmet}", lower(chosen));
        }
        let unknown = chosen & !u128::from(offered);
        if unknown != 0 {
            return format!("features {chosen:#x} refused: {unknown:#x} not offered; the device offers {offered:#x}");
        }
        let is_missing = |bit: u32| has(self.required | 1 << VIRTIO_F_VERSION_1, bit) && !has(lower(chosen), bit);
        let missing = (0..u64::BITS).filter(|bit| is_missing(*bit)).map(required_text);
        let unmet = self.unmet(true).map(|requirement| requirement.text.to_string());
        format!("features {chosen:#x} refused: {}", missing.chain(unmet).collect::<Vec<_>>().join(", "))
    }

    /// The line about `written` as the size of the selected queue, if that was not taken.
    fn size_refusal(&self, written: u16) -> Option<String> {
        let index = self.queue_select;
        let Some(queue) = self.queues.get(usize::from(index)) else {
            return Some(format!("queue {index}: size {written} refused: there is no such queue"));
        };
        let QueueRegisters { size, max_size, enabled, .. } = *queue;
        let reason = match () {
            () if size == written => return None,
            () if enabled => "the queue is enabled".to_string(),
            () if self.status().contains(Status::DRIVER_OK) => "the driver has set DRIVER_OK before".to_string(),
            () => format!("no power of two up to {max_size}"),
        };
        Some(format!("queue {index}: size {written} refused: {reason}; it stays {size}"))
    }

    /// The line about `written` as the vector of a queue, or of configuration changes, if that was not taken.
    fn vector_refusal(&self, queue: Option<u16>, written: u16) -> Option<String> {
        let now = queue.map_or_else(|| self.interrupts.config_vector(), |queue| self.interrupts.queue_vector(queue));
        if now == written {
            return None;
        }
        let of = queue.map_or_else(|| "configuration changes".to_string(), |queue| format!("queue {queue}"));
        let reason = match self.vectors.checked_sub(1) {
            _ if queue.is_some_and(|queue| usize::from(queue) >= self.queues.len()) => {
                "there is no such queue".to_string()
            }
            Some(last) if written > last => format!("the last vector is {last}"),
            Some(_) => "the host has no eventfd for it".to_string(),
            None => "there is no vector".to_string(),
        };
        Some(format!("{of}: vector {written:#x} refused: {reason}; it reads {now:#x}"))
    }

    /// The line about the selected queue, which the driver has just enabled or tried to.
    fn queue_line(&self) -> String {
        let index = self.queue_select;
        let Some(queue) = self.queues.get(usize::from(index)) else {
            return format!("queue {index} not enabled: the device has no such queue");
        };
        let QueueRegisters { size, descriptor, driver, device, .. } = queue;
        if queue.enabled {
            let vector = self.interrupts.queue_vector(index);
            let early = if self.status().contains(Status::FEATURES_OK) { "" } else { " before FEATURES_OK" };
            return format!("queue {index} enabled{early}: size {size}, vector {vector:#x}");
        }
        let status = self.status();
        if status.contains(Status::DRIVER_OK) {
            return format!("queue {index} not enabled: DRIVER_OK is set already");
        }
        format!("queue {index} not enabled: misaligned addresses {descriptor:#x}, {driver:#x}, {device:#x}")
    }
}

/// Text about a feature that the driver must choose, and has not.
fn required_text(bit: u32) -> String {
    match bit {
        VIRTIO_F_VERSION_1 => "VERSION_1 (bit 32) is missing".to_string(),
        VIRTIO_F_ACCESS_PLATFORM => "ACCESS_PLATFORM (bit 33) is missing".to_string(),
        bit => format!("bit {bit} is missing"),
    }
}

/// The line about a write of a width that no register at `offset` has.
fn width_refusal(offset: u64, len: usize) -> String {
    let register = if matches!(offset, 0x14) { " (device_status)" } else { "" };
    let unit = if len == 1 { "byte" } else { "bytes" };
    format!("a write of {len} {unit} at {offset:#x}{register} refused: it is not a register's place and width")
}

/// The names of the bits of `status`.
fn names(status: Status) -> String {
    if status.is_empty() {
        return "reset".to_string();
    }
    status.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FeatureRequirement;

    const OFFERED: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << 5;

    fn transport() -> Transport {
        Transport::new(1 << 5, false, &[256, 128], 3).unwrap()
    }

    /// Writes the registers of the driver's features, and FEATURES_OK.
    fn choose(transport: &mut Transport, features: u64) {
        for (select, word) in [(0u32, features as u32), (1, (features >> 32) as u32)] {
            transport.write(0x08, &select.to_le_bytes());
            transport.write(0x0c, &word.to_le_bytes());
        }
        transport.write(0x14, &[0xb]);
    }

    #[test]
    fn status_and_features_are_named_with_the_reason_of_a_refusal() {
        let mut agreed = transport();
        choose(&mut agreed, OFFERED);
        assert_eq!(names(agreed.status()), "ACKNOWLEDGE DRIVER FEATURES_OK");
        assert_eq!(agreed.features_line(), "features 0x100000020 of 0x100000020 negotiated");
        agreed.write(0x14, &[0]);
        assert_eq!(names(agreed.status()), "reset");
        let mut unknown = transport();
        choose(&mut unknown, OFFERED | 1 << 9);
        let expected = "features 0x100000220 refused: 0x200 not offered; the device offers 0x100000020";
        assert_eq!(
            (names(unknown.status()).as_str(), unknown.features_line().as_str()),
            ("ACKNOWLEDGE DRIVER", expected)
        );
        let mut legacy = transport();
        choose(&mut legacy, 1 << 5);
        let expected = "features 0x20 refused: VERSION_1 (bit 32) is missing";
        assert_eq!(legacy.features_line(), expected);
    }

    #[test]
    fn a_queue_is_logged_with_its_size_or_why_it_is_not_enabled() {
        let mut transport = transport();
        choose(&mut transport, OFFERED);
        let mut enable = |queue: u16, address: u32| {
            transport.write(0x16, &queue.to_le_bytes());
            transport.write(0x18, &64u16.to_le_bytes());
            transport.write(0x20, &address.to_le_bytes());
            transport.write(0x1c, &[1, 0]);
            transport.queue_line()
        };
        assert_eq!(enable(1, 0x1000), "queue 1 enabled: size 64, vector 0xffff");
        assert_eq!(enable(0, 0x1001), "queue 0 not enabled: misaligned addresses 0x1001, 0x0, 0x0");
        assert_eq!(enable(2, 0x1000), "queue 2 not enabled: the device has no such queue");
    }

    #[test]
    fn a_write_that_changes_no_status_has_no_line() {
        let (mut transport, mut lines) = (transport(), Vec::new());
        for written in [0, 1, 1, 3, 0] {
            let before = transport.status();
            transport.write(0x14, &[written]);
            transport.log_write(before, 0x14, &[written], &mut |line| lines.push(line()));
        }
        let expected =
            ["driver status 0x1: ACKNOWLEDGE", "driver status 0x3: ACKNOWLEDGE DRIVER", "driver status 0x0: reset"];
        assert_eq!(lines, expected);
    }

    /// Writes the register and returns the lines about it.
    fn lines(transport: &mut Transport, offset: u64, data: &[u8]) -> Vec<String> {
        let (before, mut lines) = (transport.status(), Vec::new());
        transport.write(offset, data);
        transport.log_write(before, offset, data, &mut |line| lines.push(line()));
        lines
    }

    #[test]
    fn a_mistake_of_a_driver_has_a_line_with_the_reason() {
        let mut t = transport();
        let refused = "driver status: DRIVER_OK refused: FEATURES_OK is not set";
        assert_eq!(lines(&mut t, 0x14, &[7]), [refused, "driver status 0x3: ACKNOWLEDGE DRIVER"]);
        assert_eq!(lines(&mut t, 0x14, &[7]), [refused]);
        let width = "a write of 2 bytes at 0x14 (device_status) refused: it is not a register's place and width";
        assert_eq!(lines(&mut t, 0x14, &[15, 0]), [width]);
        let size = "queue 0: size 100 refused: no power of two up to 256; it stays 256";
        assert_eq!(lines(&mut t, 0x18, &[100, 0]), [size]);
        assert_eq!(lines(&mut t, 0x18, &[128, 0]), [""; 0]);
        let vector = "queue 0: vector 0x4d refused: the last vector is 2; it reads 0xffff";
        assert_eq!(lines(&mut t, 0x1a, &[77, 0]), [vector]);
        let config = "configuration changes: vector 0x4d refused: the last vector is 2; it reads 0xffff";
        assert_eq!(lines(&mut t, 0x10, &[77, 0]), [config]);
        assert_eq!((lines(&mut t, 0x10, &[0xff; 2]), lines(&mut t, 0x1a, &[2, 0])), (vec![], vec![]));
        let early = "queue 0 enabled before FEATURES_OK: size 128, vector 0x2";
        assert_eq!(lines(&mut t, 0x1c, &[1, 0]), [early]);
        let late = "queue 0: size 64 refused: the queue is enabled; it stays 128";
        assert_eq!(lines(&mut t, 0x18, &[64, 0]), [late]);
    }

    #[test]
    fn features_without_those_that_they_need_are_named() {
        const fn needs(feature: u32, enforced: bool, text: &'static str) -> FeatureRequirement {
            FeatureRequirement { feature, any_of: 1 << 5, enforced, text }
        }
        const NEEDS: &[FeatureRequirement] = &[needs(6, true, "SIX needs FIVE"), needs(7, false, "SEVEN needs FIVE")];
        let with = |features: u64| {
            let mut t = Transport::new(0xe0, false, &[256], 3).unwrap().requiring(NEEDS);
            t.require(VIRTIO_F_ACCESS_PLATFORM);
            choose(&mut t, features);
            t.features_line()
        };
        let modern = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_F_ACCESS_PLATFORM;
        assert_eq!(with(modern | 0xe0), "features 0x3000000e0 of 0x3000000e0 negotiated");
        let accepted = "features 0x300000080 of 0x3000000e0 negotiated, although SEVEN needs FIVE";
        assert_eq!(with(modern | 0x80), accepted);
        assert_eq!(with(modern | 0x40), "features 0x300000040 refused: SIX needs FIVE");
        let both = "features 0xc0 refused: VERSION_1 (bit 32) is missing, ACCESS_PLATFORM (bit 33) is missing, \
                    SIX needs FIVE";
        assert_eq!(with(0xc0), both);
    }
}
