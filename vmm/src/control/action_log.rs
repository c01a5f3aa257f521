//! Lines of the log about clients' requests: `pf0v3: vm.set-vf: ok`.

use std::borrow::Cow;

use crate::api::{Action, Failure, Reply, SetVf};
use crate::telemetry::log_line;

/// Limit on an id in a line, in characters. The id of a request may be any text.
const LONGEST_ID: usize = 64;
/// Limit on the reason of a refusal, in characters, which may repeat a part of the request.
const LONGEST_REASON: usize = 1024;

/// A change that a client asks for, as its line begins. `None` for requests that change nothing, and without `-v`.
pub(super) fn begin(action: &Action) -> Option<String> {
    if !log::log_enabled!(log::Level::Info) {
        return None;
    }
    let (id, name) = change(action)?;
    let id: String = id.chars().filter(|c| !c.is_control()).take(LONGEST_ID).collect();
    Some(format!("{id}: {name}"))
}

/// Logs the outcome of such a change.
pub(super) fn end(change: Option<&str>, outcome: &Result<Reply, Failure>) {
    match (change, outcome) {
        (None, _) => {}
        (Some(change), Ok(_)) => log::info!("{change}: ok"),
        (Some(change), Err(failure)) => log::info!("{change}: refused: {}", reason(failure)),
    }
}

fn reason(failure: &Failure) -> String {
    failure.chain.join(": ").chars().take(LONGEST_REASON).collect()
}

/// The subject of a change, and its endpoint.
fn change(action: &Action) -> Option<(Cow<'_, str>, &'static str)> {
    let of_vm = |name| Some((Cow::from("vm"), name));
    match action {
        Action::Ping | Action::Info | Action::Counters | Action::MigrationProgress | Action::Metrics => None,
        Action::ShutdownVmm => Some((Cow::from("vmm"), "vmm.shutdown")),
        Action::Create(_) => of_vm("vm.create"),
        Action::Boot => of_vm("vm.boot"),
        Action::Delete => of_vm("vm.delete"),
        Action::Pause => of_vm("vm.pause"),
        Action::Resume(_) => of_vm("vm.resume"),
        Action::Shutdown => of_vm("vm.shutdown"),
        Action::Reboot => of_vm("vm.reboot"),
        Action::PowerButton => of_vm("vm.power-button"),
        Action::Nmi => of_vm("vm.nmi"),
        Action::Resize(_) => of_vm("vm.resize"),
        Action::ResizeZone(_) => of_vm("vm.resize-zone"),
        Action::Snapshot(_) => of_vm("vm.snapshot"),
        Action::Restore(..) => of_vm("vm.restore"),
        Action::SendMigration(_) => of_vm("vm.send-migration"),
        Action::ReceiveMigration(..) => of_vm("vm.receive-migration"),
        Action::CancelMigration => of_vm("vm.cancel-migration"),
        Action::ResizeDisk(resize) => Some((Cow::from(&resize.id), "vm.resize-disk")),
        Action::RemoveDevice(device) => Some((Cow::from(&device.id), "vm.remove-device")),
        Action::SetVf(change, _) => {
            let SetVf { pf, index, .. } = &**change;
            let index = index.map(|index| index.to_string());
            Some((Cow::from(log_line::subject(pf, index.as_deref())), "vm.set-vf"))
        }
        Action::InjectFault(fault) => {
            let index = fault.index.map(|index| index.to_string());
            Some((Cow::from(log_line::subject(&fault.id, index.as_deref())), "vm.inject-fault"))
        }
        Action::Add(device) => Some((Cow::from(device.id().unwrap_or("vm")), device.texts().endpoint())),
    }
}

#[cfg(test)]
mod tests {
    use vm_api::config::VfRange;

    use super::*;
    use crate::error_kind::ErrorKind;

    #[test]
    fn changes_are_named_with_the_function_that_they_change() {
        let vf = |index: Option<u16>| {
            let index = index.map(VfRange::from);
            Action::SetVf(Box::new(SetVf { pf: "pf0".to_string(), index, ..SetVf::default() }), Vec::new())
        };
        assert_eq!(change(&vf(Some(3))), Some((Cow::from("pf0v3"), "vm.set-vf")));
        assert_eq!(change(&vf(None)), Some((Cow::from("pf0"), "vm.set-vf")));
        assert_eq!(change(&Action::Pause), Some((Cow::from("vm"), "vm.pause")));
        assert_eq!(change(&Action::Metrics), None);
    }

    #[test]
    fn a_reason_that_repeats_a_request_is_cut() {
        let failure = |what: &str| Failure::new(ErrorKind::NotFound, what);
        assert_eq!(reason(&failure("there is no device x")), "there is no device x");
        assert_eq!(reason(&failure(&"x".repeat(1 << 20))).len(), LONGEST_REASON);
    }
}
