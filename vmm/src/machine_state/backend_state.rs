//! Backend state besides queues, such as connections on the guest's behalf. Only a live migration saves it: a backend
//! may exit once its state is saved (passt does), and the guest then uses the target's backend. After a snapshot the
//! guest keeps its backend.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use virtio_devices::{HexBytes, MAX_DEVICE_STATE, MemoryUser};

/// Time for all backends of a VM to save their states, and to load them. The guest is paused during both.
const TRANSFER: Duration = Duration::from_secs(10);
/// Time for all backends to confirm that their state is complete.
const CONFIRMATION: Duration = Duration::from_secs(5);
/// Limit on the sum of a VM's backend states, in bytes, which are sent in hexadecimal with the machine state.
const MOST: usize = 24 << 20;

/// Function of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BackendOf {
    /// Id of the device.
    pub id: String,
    /// Index of the VF; `None` for the device's own function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<u16>,
}

/// State of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BackendState {
    /// Function of the backend.
    pub of: BackendOf,
    /// Opaque bytes of the backend.
    pub state: HexBytes<MAX_DEVICE_STATE>,
}

/// A backend with state to migrate.
#[derive(Debug, Clone)]
pub(crate) struct StatefulBackend {
    /// Function of the backend.
    pub of: BackendOf,
    /// Option that configures the backend.
    pub option: String,
    /// The backend.
    pub user: MemoryUser,
}

/// Saves the states of `backends`, whose queues are stopped. Blocks: not for the control thread.
///
/// Confirmations come last, because a backend may exit once it has confirmed, but before the target is ready: until
/// passt exits, it holds the sockets that its successor takes over.
///
/// # Errors
///
/// Fails if a backend does not deliver its whole state. Backends that have exited by then are lost; the others keep
/// running.
pub(crate) fn save(backends: &[StatefulBackend]) -> Result<Vec<BackendState>, String> {
    let until = Instant::now() + TRANSFER;
    let (mut states, mut saved, mut total) = (Vec::new(), Vec::new(), 0);
    for StatefulBackend { of, option, user } in backends {
        let Some(state) = user.save_state(until).map_err(|error| format!("{option}: {error}"))? else { continue };
        total += state.len();
        if total > MOST {
            return Err(format!(
                "{option}: the states of all backends have more than {MOST} bytes; give the VM fewer such backends"
            ));
        }
        states.push(BackendState { of: of.clone(), state: HexBytes(state) });
        saved.push((option, user));
    }
    let until = Instant::now() + CONFIRMATION;
    let confirm = |(option, user): &(&String, &MemoryUser)| {
        user.confirm_state(until).map_err(|error| format!("{option}: {error}"))
    };
    saved.iter().try_for_each(confirm)?;
    Ok(states)
}

/// Loads each of `states` into its backend, whose queues have never run. Drops states of functions without a backend
/// here, with a warning.
///
/// # Errors
///
/// Fails if a backend rejects its state.
pub(crate) fn load(backends: &[StatefulBackend], states: &[BackendState]) -> Result<(), String> {
    let until = Instant::now() + TRANSFER;
    for BackendState { of, state: HexBytes(state) } in states {
        let Some(StatefulBackend { option, user, .. }) = backends.iter().find(|backend| backend.of == *of) else {
            log::warn!("{of}: what its backend held for the guest at the source is lost: it has no backend here");
            continue;
        };
        user.load_state(state, until).map_err(|error| format!("{option}: {error}"))?;
    }
    Ok(())
}

impl std::fmt::Display for BackendOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.vf {
            Some(vf) => write!(f, "{}/{vf}", self.id),
            None => f.write_str(&self.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vf: Option<u16>) -> BackendOf {
        BackendOf { id: "pf0".to_string(), vf }
    }

    #[test]
    fn a_state_is_what_it_was_and_nothing_longer_is_read() {
        let state = BackendState { of: of(Some(3)), state: HexBytes((0..=255).collect()) };
        let text = serde_json::to_string(&state).unwrap();
        assert!(text.starts_with(r#"{"of":{"id":"pf0","vf":3},"state":"000102"#), "{text}");
        assert_eq!(serde_json::from_str::<BackendState>(&text).unwrap(), state);
        let long = |bytes: usize| format!(r#"{{"of":{{"id":"a"}},"state":"{}"}}"#, "00".repeat(bytes));
        assert!(serde_json::from_str::<BackendState>(&long(MAX_DEVICE_STATE)).is_ok());
        let said = serde_json::from_str::<BackendState>(&long(MAX_DEVICE_STATE + 1)).unwrap_err().to_string();
        assert!(said.starts_with("not bytes in hexadecimal, at most 16777216"), "{said}");
    }

    #[test]
    fn all_states_fit_into_what_is_sent_with_room_for_the_machine() {
        const { assert!(2 * MOST + (8 << 20) <= crate::migration::wire::MAX_DOCUMENT && MAX_DEVICE_STATE <= MOST) };
    }

    #[test]
    fn a_state_without_a_backend_here_is_left_out() {
        assert_eq!(load(&[], &[BackendState { of: of(None), state: HexBytes(vec![1]) }]), Ok(()));
        assert_eq!((of(None).to_string(), of(Some(7)).to_string()), ("pf0".to_string(), "pf0/7".to_string()));
    }
}
