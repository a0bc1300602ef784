//! Layers of table 1 of SS-RTUDP, by the names of the kernel's functions (Linux 6.18 to 7.3).

/// A layer, what the paper's took of a UDP packet's 68.1 µs (DMA and media the rest), and what its functions begin with; the longest beginning
/// decides.
#[derive(Debug)]
pub struct Layer {
    /// For tables.
    pub name: &'static str,
    /// In microseconds.
    pub paper_us: Option<f64>,
    functions: &'static str,
}

const fn layer(name: &'static str, paper_us: f64, functions: &'static str) -> Layer {
    Layer {
        name,
        paper_us: if paper_us > 0.0 { Some(paper_us) } else { None },
        functions,
    }
}

/// The last ones are of programs and drivers, of which all functions are, and of what nobody else has.
pub const LAYERS: [Layer; 11] = [
    layer(
        "system call, socket",
        3.2,
        "entry_SYSCALL do_syscall x64_sys syscall_ __x64_sys __sys_ ____sys ___sys sock __sock security_socket inet_sendmsg \
         inet_recvmsg fdget __fdget fput import_ move_addr",
    ),
    layer(
        "UDP/IP, sending",
        14.8,
        "udp_send udp_push ip_make __ip_make ip_append __ip_append ip_setup ip_generic ip_route_output ip_output \
         ip_finish_output __ip_finish_output ip_local_out __ip_local_out ip_send ip_fragment ip_do_fragment neigh_ fib_ dst_ \
         ipv4_",
    ),
    layer(
        "UDP/IP, receiving",
        23.5,
        "ip_rcv ip_list_rcv ip_sublist_rcv ip_local_deliver ip_protocol_deliver ip_route_input ip_defrag ip_frag_ inet_frag \
         udp_rcv udp_queue udp_unicast udp_recv udp4_ udp_v4 __udp __skb_recv_udp skb_consume_udp __skb_try_recv",
    ),
    layer("AF_XDP", 0.0, "xsk_ __xsk xp_ xdp_ __xdp"),
    layer(
        "XDP program",
        0.0,
        "bpf_prog_ bpf_dispatcher bpf_xdp htab_ __htab array_map",
    ),
    layer(
        "interrupt, NAPI",
        6.9,
        "net_rx_action napi_ __napi handle_softirqs do_softirq __do_softirq __local_bh irq_exit __irq_exit raise_softirq \
         __raise_softirq netif_ __netif process_backlog run_ksoftirqd asm_ sysvec_ common_interrupt",
    ),
    layer(
        "sleeping, waking up",
        0.0,
        "schedule __schedule sched_ try_to_wake ttwu wake_up __wake autoremove_wake default_wake pollwake sock_def_ ep_ do_poll \
         do_sys_poll __x64_sys_ppoll __x64_sys_poll poll_ __poll finish_task_switch __switch_to prepare_to_wait finish_wait \
         __skb_wait flush_smp_call __flush_smp_call generic_smp_call sysvec_reschedule asm_sysvec_reschedule enqueue_ dequeue_ \
         sysvec_call_function asm_sysvec_call_function do_idle default_idle cpuidle cpu_idle pv_native_safe_halt tick_nohz_idle \
         pick_ update_curr update_load update_rq set_next_ put_prev_ select_task __update_load place_entity reweight_ hrtimer \
         __hrtimer ktime_ tick_ read_tsc native_sched_clock psi_ __dequeue __enqueue _find_next_bit account_ nohz_ newidle_ \
         select_ available_idle native_smp_send x2apic_ call_cpuidle",
    ),
    layer(
        "packet memory, copies",
        0.0,
        "skb_ __skb __pi_mem alloc_skb __alloc_skb kfree_skb __kfree_skb consume_skb napi_skb napi_consume kmem_ kmalloc __kmalloc kfree \
         __kfree ___slab __slab slab_ memcpy __memcpy memset __memset memmove __memmove copy_ _copy __copy rep_movs page_ \
         __page folio put_page get_page free_ __free build_skb __build_skb csum_",
    ),
    layer(
        "driver",
        6.8,
        "veth_ dev_ __dev_ netdev_ validate_xmit sch_ skb_scrub eth_ is_skb_forwardable",
    ),
    layer("programs", 0.0, ""),
    layer("other", 7.4, ""),
];
/// Places in it.
pub(super) const DRIVER: usize = LAYERS.len() - 3;
pub(super) const PROGRAMS: usize = LAYERS.len() - 2;
const OTHER: usize = LAYERS.len() - 1;

/// The place of a function's layer.
pub(super) fn of(function: &str) -> usize {
    let longest = |functions: &str| {
        let fits = { functions.split_whitespace() }.filter(|begin| function.starts_with(begin));
        fits.map(str::len).max().unwrap_or(0)
    };
    let of_layers = LAYERS.iter().map(|layer| longest(layer.functions)).enumerate();
    match of_layers.max_by_key(|(_, len)| *len) {
        Some((place, len)) if len > 0 => place,
        _ => OTHER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_of_the_layer_with_the_longest_beginning() {
        for (function, layer) in [
            ("udp_sendmsg", "UDP/IP, sending"),
            ("udp_queue_rcv_skb", "UDP/IP, receiving"),
            ("__ip_append_data.isra.0", "UDP/IP, sending"),
            ("xsk_generic_xmit", "AF_XDP"),
            ("bpf_prog_6deef7357e7b4530_gate", "XDP program"),
            ("skb_release_data", "packet memory, copies"),
            ("skb_consume_udp", "UDP/IP, receiving"),
            ("sock_def_readable", "sleeping, waking up"),
            ("sock_alloc_send_pskb", "system call, socket"),
            ("dev_hard_start_xmit", "driver"),
            ("_raw_spin_lock", "other"),
        ] {
            assert_eq!(LAYERS[of(function)].name, layer, "{function}");
        }
    }

    #[test]
    fn layers_are_the_papers() {
        let paper: f64 = LAYERS.iter().filter_map(|layer| layer.paper_us).sum();
        // DMA and media, 5.5 µs.
        assert!((paper + 5.5 - 68.1).abs() < 1e-9, "{paper}");
        assert_eq!(
            [DRIVER, PROGRAMS, OTHER].map(|place| LAYERS[place].name),
            ["driver", "programs", "other"]
        );
    }
}
