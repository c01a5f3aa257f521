//! A place of a guest that moves: a VMM, with its own backends.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::backends::{Backend, Backends};
use crate::guest::{Guest, GuestSpec};
use crate::host::tap::HostTap;
use crate::lab::Kernel;
use crate::migration_wire::{Point, Then, Wire};
use crate::vmm::VmmCommand;
use crate::vmm::api::Api;
use crate::vmm::shared_memory::{self, Difference};

/// Time that a migration may take.
const LIMIT: Duration = Duration::from_secs(120);

/// A VMM that stays when its guest has left, and its backends.
pub struct Site {
    name: &'static str,
    /// The guest, while it is here. Its VMM ends before the backends.
    pub guest: Guest,
    /// API of the VMM.
    pub api: Api,
    /// The backends of the VFs.
    pub backends: Backends,
    /// The tap of the PF.
    pf: HostTap,
    /// Number of earlier VMMs at this place.
    restarts: usize,
}

/// A place for a VMM that is not started yet.
pub struct Plan {
    name: &'static str,
    api: Api,
    backends: Backends,
    pf: HostTap,
}

impl Plan {
    /// A place whose taps' names start with `name`: the VFs' names end with their index, the PF's with `pf`.
    pub fn new(name: &'static str, kinds: &[Backend]) -> Plan {
        let backends = Backends::start_persistent(name, kinds);
        Plan { name, api: Api::new(name), backends, pf: HostTap::persistent(&format!("{name}pf")) }
    }

    /// Boots a guest there, with the changes of `more`.
    pub fn boot(self, kernel: Kernel, more: impl FnOnce(GuestSpec) -> GuestSpec) -> Site {
        let spec = more(self.backends.spec_over(self.pf.name(), kernel));
        let spec = spec.arguments(&["--no-shutdown", "--api-socket", &self.api.argument()]);
        let guest = Guest::boot(spec);
        self.with(guest)
    }

    /// Boots the guest that `spec` makes for the name of the PF's tap there.
    pub fn boot_over(self, spec: impl FnOnce(&str) -> GuestSpec) -> Site {
        let spec = spec(self.pf.name());
        let guest = Guest::boot(spec.arguments(&["--no-shutdown", "--api-socket", &self.api.argument()]));
        self.with(guest)
    }

    /// Starts a VMM without a guest there, with further `arguments`.
    pub fn wait(self, arguments: &[&str]) -> Site {
        let guest = wait(&self.api, arguments);
        self.with(guest)
    }

    fn with(self, guest: Guest) -> Site {
        let Plan { name, api, backends, pf } = self;
        Site { name, api, backends, pf, guest, restarts: 0 }
    }
}

fn wait(api: &Api, arguments: &[&str]) -> Guest {
    Guest::restored_by(VmmCommand::new().args(["--no-shutdown", "--api-socket", &api.argument()]).args(arguments))
}

impl Site {
    /// Starts another VMM without a guest, with the same backends, after the previous one was killed.
    pub fn restart(&mut self) {
        self.restarts += 1;
        self.api = Api::new(&format!("{}{}", self.name, self.restarts));
        self.guest = wait(&self.api, &[]);
        let _ = std::fs::remove_file(self.socket());
    }

    /// Socket on which the VMM waits for guests.
    pub fn socket(&self) -> PathBuf {
        std::env::temp_dir().join(format!("migration-{}-{}", std::process::id(), self.name))
    }

    /// The URL of the socket.
    pub fn url(&self) -> String {
        format!("unix:{}", self.socket().display())
    }

    /// Starts to wait for a guest, whose functions get the backends of this place.
    pub fn receive(&self) {
        let pf = json!({"id": "pf0", "tap": self.pf.name()});
        let vfs = (0..self.backends.taps().len()).map(|index| self.backends.given(index));
        let backends: Vec<Value> = std::iter::once(pf).chain(vfs).collect();
        self.receive_by(&json!({"receiver_url": self.url(), "detach": true, "backends": backends}));
    }

    fn receive_by(&self, body: &Value) {
        let answer = self.api.put_json("vm.receive-migration", body);
        assert_eq!(answer.status, 204, "{}", answer.body);
    }

    /// Starts to send the guest to `url`, with the keys of `more`.
    pub fn send(&self, url: &str, more: &Value) {
        let mut body = json!({"destination_url": url});
        for (key, value) in more.as_object().into_iter().flatten() {
            body[key] = value.clone();
        }
        let answer = self.api.put_json("vm.send-migration", &body);
        assert_eq!(answer.status, 204, "{}", answer.body);
    }

    /// Waits until the migration has ended, and returns its result.
    pub fn ended(&self) -> Value {
        let deadline = Instant::now() + LIMIT;
        loop {
            let progress = self.api.get("vm.migration-progress").body;
            if progress["state"] != "active" {
                return progress;
            }
            assert!(Instant::now() < deadline, "the migration does not end: {progress}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// As [`Site::move_to`]. Before the guest is handed over, compares the memory of both VMMs, which is shared with
    /// backends. Also returns the differing pages.
    pub fn move_compared_to(&self, other: &Site, more: &Value) -> (Value, Vec<Difference>) {
        let wire = self.send_until(other, Point::GO, more);
        let pages = shared_memory::differing_pages(self.guest.vmm(), other.guest.vmm());
        wire.goes(Then::Passes);
        (self.moved(other), pages)
    }

    /// Starts to move the guest to `other`, and returns when the frame at `point` is about to be forwarded.
    pub fn send_until(&self, other: &Site, point: Point, more: &Value) -> Wire {
        other.receive();
        let path = self.socket().with_extension("wire");
        let wire = Wire::new(&path, &other.socket(), &[point]);
        self.send(&format!("unix:{}", path.display()), more);
        wire.reaches();
        wire
    }

    /// Moves the guest to `other`, which must succeed. Returns the source's result.
    pub fn move_to(&self, other: &Site, more: &Value) -> Value {
        other.receive();
        self.send(&other.url(), more);
        self.moved(other)
    }

    /// As [`Self::move_to`], with the guest's present memory and taps: no page is copied. Its memory must be shared.
    pub fn pass_to(&self, other: &Site) -> Value {
        other.receive_by(&json!({"receiver_url": other.url(), "detach": true}));
        self.send(&other.url(), &json!({"local": true}));
        self.moved(other)
    }

    /// Waits until the guest has moved to `other`, which must succeed. Returns the source's result.
    pub fn moved(&self, other: &Site) -> Value {
        let (sent, received) = (self.ended(), other.ended());
        assert_eq!(
            (&sent["state"], &received["state"]),
            (&json!("finished"), &json!("finished")),
            "{sent}\n{received}"
        );
        sent
    }
}
