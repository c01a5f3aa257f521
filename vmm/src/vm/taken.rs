//! The error of a VM that cannot be restored, and in it, taps and sockets of the host that another program uses.

use virtio_devices::{CharError, TapError, VhostUserError, VsockError};

use super::error::VmError;
use crate::devices::DeviceError;
use crate::devices::backends::BackendError;
use crate::machine_state::error::{RestoreError, Taken};
use crate::serial::end::ConsoleError;

/// The tap or socket in use, if that is why the VM cannot be created.
fn taken(error: &VmError) -> Option<Taken> {
    match error {
        VmError::Devices(DeviceError::Backend { option, error: BackendError::Tap(TapError::InUse(_)) }) => {
            Some(Taken::Tap(function(option)))
        }
        VmError::Devices(DeviceError::Backend { option, error }) => {
            matches!(error, BackendError::VhostUser(VhostUserError::InUse(_)))
                .then(|| Taken::BackendSocket(function(option)))
        }
        VmError::Devices(DeviceError::Open { error, .. }) => {
            matches!(error.downcast_ref(), Some(VsockError::InUse(_))).then_some(Taken::Socket)
        }
        VmError::Console(ConsoleError::End { error: CharError::SocketInUse(_), .. }) => Some(Taken::Socket),
        _ => None,
    }
}

impl From<VmError> for RestoreError {
    fn from(error: VmError) -> Self {
        let (text, kind) = (error.to_string(), error.kind());
        match taken(&error) {
            Some(what) => Self::Taken { what, text, kind },
            None => Self::Vm(text, kind),
        }
    }
}

/// The name of a network function in `backends`, from its option.
fn function(option: &str) -> String {
    let vf = option.strip_prefix("--net-vf pf=").map(|vf| vf.replacen(",index=", "/", 1));
    vf.unwrap_or_else(|| option.trim_start_matches("--net id=").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_that_another_program_uses_is_found_in_an_error() {
        let tap = |option: &str| {
            let error = DeviceError::Backend { option: option.into(), error: TapError::InUse("a".into()).into() };
            taken(&error.into())
        };
        assert_eq!(tap("--net id=pf0"), Some(Taken::Tap("pf0".into())));
        assert_eq!(tap("--net-vf pf=pf0,index=3"), Some(Taken::Tap("pf0/3".into())));
        let error =
            DeviceError::Backend { option: "--net id=a".into(), error: VhostUserError::InUse("/s".into()).into() };
        assert_eq!(taken(&error.into()), Some(Taken::BackendSocket("a".into())));
        let error = CharError::SocketInUse("/s".into());
        assert_eq!(taken(&ConsoleError::End { option: "--serial", error }.into()), Some(Taken::Socket));
        let error = VsockError::InUse("/v".into());
        assert_eq!(taken(&DeviceError::open("--vsock", error.kind(), error).into()), Some(Taken::Socket));
        let error = VsockError::NotASocket("/v".into());
        assert_eq!(taken(&DeviceError::open("--vsock", error.kind(), error).into()), None);
    }
}
