//! A VF while what is written to the guest's memory is noted, as it is while the guest moves to another VMM.

use std::thread;
use std::time::Duration;

use integration::migration_wire::{Point, Then, Wire};
use integration::{Api, Backend, Kernel, Pf, Plan, Site, Subnet};
use serde_json::json;

use crate::IDLE;
use crate::container::Container;
use crate::figures::{Bench, Server, Settings};

/// The network of the VF.
const SUBNET: Subnet = Subnet(0);
/// The backends whose VFs are measured, and what they are called.
const BACKENDS: [(Backend, &str); 2] = [(Backend::Tap, "tap"), (Backend::VhostNet, "vhost-net")];

/// Measures a VF over each backend before a migration, in the middle of one, and after it has failed.
///
/// In the middle, all memory has been sent once and nothing is being sent, so that the machine's only processor has no
/// work but the guest's and its devices'.
pub(crate) fn measure(settings: Settings<'_>) {
    for (backend, name) in BACKENDS {
        let [here, there] = ["a", "b"].map(|place| Plan::new(place, &[backend]));
        let mut here = here.boot(Kernel::V6_12, |spec| spec.kernel_argument("tsc=reliable"));
        let there = there.wait(&[]);
        let pf = Pf::find(&mut here.guest);
        pf.set_num_vfs(&mut here.guest, 1);
        here.guest.wait_for(IDLE);
        let _server = Server::start("0.0.0.0");
        here.backends.taps()[0].join(SUBNET);
        let interface = pf.vfs(&mut here.guest)[0].interface().to_owned();
        let container = Container::new(&mut here.guest, "vf", SUBNET.host());
        container.give(&mut here.guest, &interface, &format!("{}/24", SUBNET.guest()));
        here.guest.wait_for(&container.inside(&format!("ping -c 1 -W 1 {}", SUBNET.host())));

        Bench { guest: &mut here.guest, settings }.measure(&format!("{name}: before"), &container);
        let api = &here.api;
        let mut moving = None;
        Bench { guest: &mut here.guest, settings }.measure_after(&format!("{name}: logged"), &container, || {
            // A source gives up soon when it hears nothing, so that each run has a migration of its own.
            moving.take().into_iter().for_each(fail);
            moving = Some(begin(api, &there));
        });
        assert_eq!(api.get("vm.migration-progress").body["state"], "active");
        moving.into_iter().for_each(fail);
        await_end(api);
        Bench { guest: &mut here.guest, settings }.measure(&format!("{name}: after"), &container);
    }
}

/// Begins to send the guest to `there`. When this returns, all of its memory has been sent once, and what it writes is
/// noted.
fn begin(api: &Api, there: &Site) -> Wire {
    await_end(api);
    await_end(&there.api);
    there.receive();
    let path = std::env::temp_dir().join("wire");
    let wire = Wire::new(&path, &there.socket(), &[Point::Frame(4, 0)]);
    let answer = api.put_json("vm.send-migration", &json!({"destination_url": format!("unix:{}", path.display())}));
    assert_eq!(answer.status, 204, "{}", answer.body);
    wire.reaches();
    wire
}

#[expect(clippy::needless_pass_by_value, reason = "all connections end with it")]
fn fail(wire: Wire) {
    wire.goes(Then::IsCut);
}

/// Waits until no migration is under way.
fn await_end(api: &Api) {
    while api.get("vm.migration-progress").body["state"] == "active" {
        thread::sleep(Duration::from_millis(10));
    }
}
