//! Lines of the log about a driver's writes to the common configuration.

use super::register::Register;
use super::{QueueRegisters, Status, Transport, lower};

impl Transport {
    /// Calls `log` with the outcome of the write of `data` at `offset`, if it concerns the device status, the features
    /// or a queue. The status was `before`.
    pub(crate) fn log_write(&self, before: Status, offset: u64, data: &[u8], log: &mut dyn FnMut(&dyn Fn() -> String)) {
        match (Register::decode(offset, data.len()), data) {
            (Some(Register::DeviceStatus), [written]) => self.log_status(before, *written, log),
            (Some(Register::QueueEnable), [1, 0]) => log(&|| self.queue_line()),
            _ => {}
        }
    }

    fn log_status(&self, before: Status, written: u8, log: &mut dyn FnMut(&dyn Fn() -> String)) {
        let now = self.status();
        if written & Status::FEATURES_OK.bits() != 0 && !before.contains(Status::FEATURES_OK) {
            log(&|| self.features_line());
        }
        if now != before {
            log(&|| format!("driver status {:#x}: {}", now.bits(), names(now)));
        }
    }

    /// The line about the features, which the driver has just chosen.
    fn features_line(&self) -> String {
        let (chosen, offered) = (self.driver_features, self.offered);
        if self.status().contains(Status::FEATURES_OK) {
            return format!("features {:#x} of {offered:#x} negotiated", lower(chosen));
        }
        let unknown = chosen & !u128::from(offered);
        if unknown != 0 {
            return format!("features {chosen:#x} refused: {unknown:#x} not offered; the device offers {offered:#x}");
        }
        format!("features {chosen:#x} refused: VERSION_1, or a feature that another one needs, is missing")
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
            return format!("queue {index} enabled: size {size}, vector {vector:#x}");
        }
        let status = self.status();
        if status.contains(Status::DRIVER_OK) {
            return format!("queue {index} not enabled: DRIVER_OK is set already");
        }
        format!("queue {index} not enabled: misaligned addresses {descriptor:#x}, {driver:#x}, {device:#x}")
    }
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
    use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

    use super::*;

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
        let expected = "features 0x20 refused: VERSION_1, or a feature that another one needs, is missing";
        assert_eq!(legacy.features_line(), expected);
    }

    #[test]
    fn a_queue_is_logged_with_its_size_or_why_it_is_not_enabled() {
        let mut transport = transport();
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
}
