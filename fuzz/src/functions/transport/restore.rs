//! Restores functions from saved states, as saved or modified.

use virtio_devices::testing::FakeDevice;
use virtio_devices::{DeviceState, Lifecycle, PositionState, VectorState, VirtioFunction};

use super::pair::Pair;
use super::rules::{DRIVER_OK, FAILED, NEEDS_RESET, QUEUE_SIZES};
use crate::input::Input;

impl Pair {
    /// Continues with another function, restored from this one's saved state.
    pub(super) fn restore(&mut self) {
        let refuse = self.function.device().refuse;
        let state = save(&mut self.function);
        let mut new = Self::function();
        new.restore(&state).expect("the state was saved by this function");
        assert_eq!(save(&mut new), state);
        let _ = new.resume();
        new.device_mut().refuse = refuse;
        self.function = new;
    }

    /// Restores another function from this one's saved state after modifying it.
    pub(super) fn restore_tampered(&mut self, input: &mut Input<'_>) {
        let refuse = std::mem::take(&mut self.function.device_mut().refuse);
        let mut state = save(&mut self.function);
        let _ = self.function.resume();
        self.function.device_mut().refuse = refuse;
        for _ in 0..1 + input.u8() % 3 {
            tamper(&mut state, input);
        }
        let mut other = Self::function();
        if other.restore(&state).is_err() {
            assert_eq!(save(&mut other), save(&mut Self::function()));
            return;
        }
        assert_eq!(save(&mut other), state);
        let _ = other.resume();
        let (status, command) = (state.function.transport.status, state.function.config.command);
        let ready = status & (DRIVER_OK | NEEDS_RESET | FAILED) == DRIVER_OK;
        let powered = command & 4 != 0 && state.function.config.power_state == 0;
        assert_eq!(other.is_running(), ready && powered);
    }
}

fn save(function: &mut VirtioFunction<FakeDevice>) -> DeviceState {
    let _ = function.pause();
    function.save().expect("the function is paused").expect("a function with registers")
}

/// Modifies one field of `state`.
fn tamper(state: &mut DeviceState, input: &mut Input<'_>) {
    let (what, n, value) = (input.u8(), input.u8(), input.u16());
    let function = &mut state.function;
    let (config, transport) = (&mut function.config, &mut function.transport);
    let queue = &mut transport.queues[usize::from(n) % QUEUE_SIZES.len()];
    match what % 16 {
        0 => transport.status = value as u8,
        1 => transport.isr = value as u8,
        2 => transport.driver_features[usize::from(n % 4)] = value.into(),
        3 => queue.size = value,
        4 => queue.enabled = !queue.enabled,
        5 => queue.descriptor = value.into(),
        6 => queue.device = u64::from(value) << (n % 48),
        7 => queue.vector = value,
        8 => transport.vectors.push(VectorState { vector: value, signalled: n % 2 == 0 }),
        9 => drop(transport.vectors.pop()),
        10 => transport.config_vector = value,
        11 => function.positions = None,
        12 => {
            let position = PositionState { queue: n.into(), next_avail: value, next_used: !value };
            function.positions.get_or_insert_default().push(position);
        }
        13 => {
            for position in function.positions.iter_mut().flatten() {
                (position.next_avail, position.next_used) = (value, value);
            }
        }
        14 => config.command = value,
        _ => config.msix.iter_mut().for_each(|msix| msix.control = value),
    }
}
