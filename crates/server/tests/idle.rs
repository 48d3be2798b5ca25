//! A cluster with clients connected and nothing to do hardly wakes up. Alone in its process, which is what is measured.

mod support;

use impresario_wire::{Answer, Call, FileKey, Role};
use support::{Cluster, Peer, pattern, who};

#[test]
fn an_idle_cluster_hardly_wakes_up() {
    let mut cluster = Cluster::start(4, |config| {
        config.data[0].device = Some("disk".into());
        config.device.insert("disk".into(), Default::default());
    });
    let _meta = impresario_server::start(&cluster.config, "meta").unwrap();
    let nodes = [
        cluster.start_io(|io| io.policy = impresario_sched::PolicySpec::named("twins")),
        cluster.start_io(|io| io.split = true),
    ];
    let layout = impresario_layout::Layout::over_all(4).unwrap();
    let mut peers: Vec<Peer> = Vec::new();
    for client in 0..20 {
        let mut peer = Peer::connect(nodes[client % 2].address(), Role::Io, client as u64);
        let (who, file) = (who(client as u64), FileKey(client as u64));
        let call = Call::FileWrite { who, file, layout, offset: 0 };
        assert_eq!(peer.call(&call, &pattern(1, 100_000)).0, Answer::Written(100_000));
        assert!(matches!(
            peer.call(
                &Call::Meta { who: impresario_wire::Who::default(), call: impresario_wire::MetaCall::Statfs },
                &[]
            )
            .0,
            Answer::Statfs(_)
        ));
        peers.push(peer);
    }
    impresario_testing::idle::until_idle(&[std::process::id()], 100.0);
}
