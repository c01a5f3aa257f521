//! States that backends have beside their queues, such as connections that they hold for the guest. Only a live
//! migration takes them: a backend may end itself when its state is taken (passt does), and the guest goes on
//! elsewhere with another. After a snapshot the guest goes on with the same.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use virtio_devices::{HexBytes, MAX_DEVICE_STATE, MemoryUser};

/// Time that all backends of a VM may take to save their states, and to load them. The guest is paused meanwhile.
const TRANSFER: Duration = Duration::from_secs(10);
/// Time that they may take to confirm that they have saved all.
const CONFIRMATION: Duration = Duration::from_secs(5);
/// The most bytes of all states of a VM. They are sent with the machine's, in hexadecimal.
const MOST: usize = 24 << 20;

/// Function that a backend belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BackendOf {
    /// The device's id.
    pub id: String,
    /// The index of its VF; the device's own function without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<u16>,
}

/// The state of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BackendState {
    /// Function that it belongs to.
    pub of: BackendOf,
    /// State that only the backend can interpret.
    pub state: HexBytes<MAX_DEVICE_STATE>,
}

/// A backend that has such a state.
#[derive(Debug, Clone)]
pub(crate) struct StatefulBackend {
    /// Function that it belongs to.
    pub of: BackendOf,
    /// The option that says so.
    pub option: String,
    /// The backend.
    pub user: MemoryUser,
}

/// Takes the states of `backends`, whose queues stand still. Not for the control thread.
///
/// A backend may end itself when it has confirmed that this was all, so that comes last. It cannot wait until the
/// target is ready: until it ends, passt holds the sockets that its successor is to take over.
///
/// # Errors
///
/// A backend does not give all of its state. Those that have not ended themselves go on, or are lost.
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

/// Gives each of `states` to its backend, whose queues have not run. One whose function has no backend here is lost.
///
/// # Errors
///
/// A backend does not take it.
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
