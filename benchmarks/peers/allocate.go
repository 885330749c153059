package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

const (
	// What kube-scheduler has where nothing is configured: workers that filter nodes, and expressions that are kept.
	parallelism, keptExpressions = 16, 10
	// Kube-scheduler looks for so many feasible nodes at least, and for this share of large clusters.
	fewestFeasible, leastPercentage = 100, 5
)

// scenario is a cluster, and the claims that are placed one after another; each claim is one pod's.
type scenario struct {
	Nodes    []*v1.Node                   `json:"nodes"`
	Node     *v1.Node                     `json:"node"` // in place of nodes, where there is one
	Classes  []*resourceapi.DeviceClass   `json:"classes"`
	Slices   []*resourceapi.ResourceSlice `json:"slices"`
	Claims   []*resourceapi.ResourceClaim `json:"claims"`
	Releases [][]int                      `json:"releases"` // before a claim, these earlier ones are given back
	Shrinks  []int                        `json:"shrinks"`  // before a claim, this slice loses its last device
	Features structured.Features          `json:"features"`
}

// place is where a claim went.
type place struct {
	Node    string      `json:"node"`
	Devices [][4]string `json:"devices"` // request, driver, pool, device
}

// placements is the answer to a scenario. A place is null where no node could serve the claim. The times are those
// of the places; where there was no time for even one, they are those of the attempt.
type placements struct {
	Places      []*place `json:"places"`
	CPUSeconds  float64  `json:"cpu_s"`
	WallSeconds float64  `json:"wall_s"`
}

// feasible is a node, by its index, that can serve a claim, and how.
type feasible struct {
	node   int
	result []resourceapi.AllocationResult
}

// cluster is a scenario under way.
type cluster struct {
	scenario
	state structured.AllocatedState
	cache *cel.Cache
	start int // where the next search begins, in the modes that take turns
	held  map[int][]resourceapi.AllocationResult
}

// Get and List make the classes of a scenario a structured.DeviceClassLister.
func (c *cluster) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c.Classes {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("there is no class %q", name)
}

func (c *cluster) List() ([]*resourceapi.DeviceClass, error) { return c.Classes, nil }

func allocate(input io.Reader, mode string, pods int, limit time.Duration) (*placements, error) {
	search, known := map[string]func(*cluster, searching, *resourceapi.ResourceClaim) (*feasible, error){
		"first":    (*cluster).first,
		"sched":    (*cluster).sampled,
		"rotating": (*cluster).rotating,
	}[mode]
	if !known {
		return nil, fmt.Errorf("-mode %q: say first, sched or rotating", mode)
	}
	var asked scenario
	if err := json.NewDecoder(input).Decode(&asked); err != nil {
		return nil, err
	}
	c := newCluster(asked)
	if pods == 0 || pods > len(c.Claims) {
		pods = len(c.Claims)
	}
	cel.GetCompiler(c.celFeatures()).CompileCELExpression("true", cel.Options{}) // loads CEL
	answer := &placements{Places: []*place{}}
	began, spent := time.Now(), cpuSeconds()
	until, done := context.WithTimeout(context.Background(), limit)
	defer done()
	c.cache = cel.NewCache(keptExpressions, c.celFeatures())
	for number, claim := range c.Claims[:pods] {
		c.change(number)
		// As the scheduler does it: an allocator for each pod, of what is allocated at that moment.
		allocator, err := structured.NewAllocator(until, c.Features, c.state, c, c.Slices, c.cache)
		if err != nil {
			return nil, err
		}
		found, err := search(c, searching{until, allocator}, claim)
		if until.Err() != nil {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("claim %d: %w", number, err)
		}
		answer.Places = append(answer.Places, c.take(number, found))
		answer.CPUSeconds, answer.WallSeconds = cpuSeconds()-spent, time.Since(began).Seconds()
	}
	if len(answer.Places) == 0 {
		answer.CPUSeconds, answer.WallSeconds = cpuSeconds()-spent, time.Since(began).Seconds()
	}
	return answer, nil
}

// newCluster is a scenario before its first claim.
func newCluster(asked scenario) *cluster {
	c := &cluster{scenario: asked, held: map[int][]resourceapi.AllocationResult{}}
	if c.Node != nil {
		c.Nodes = append(c.Nodes, c.Node)
	}
	c.cache = cel.NewCache(keptExpressions, c.celFeatures())
	c.state = structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	return c
}

func (c *cluster) celFeatures() cel.Features {
	return cel.Features{
		EnableConsumableCapacity: c.Features.ConsumableCapacity,
		EnableListTypeAttributes: c.Features.ListTypeAttributes,
	}
}

// change is what happens in the cluster before a claim.
func (c *cluster) change(number int) {
	if number < len(c.Releases) {
		for _, earlier := range c.Releases[number] {
			c.giveBack(earlier)
		}
	}
	if number < len(c.Shrinks) {
		smaller := c.Slices[c.Shrinks[number]].DeepCopy()
		smaller.Spec.Devices = smaller.Spec.Devices[:max(0, len(smaller.Spec.Devices)-1)]
		c.Slices[c.Shrinks[number]] = smaller
	}
}

// searching is the allocator for one pod, and until when it may search.
type searching struct {
	until     context.Context
	allocator structured.Allocator
}

// on asks for one node. An error that concerns this node alone is a refusal.
func (c *cluster) on(node int, pod searching, claim *resourceapi.ResourceClaim) (*feasible, error) {
	result, err := pod.allocator.Allocate(pod.until, c.Nodes[node], []*resourceapi.ResourceClaim{claim})
	if errors.Is(err, structured.ErrFailedAllocationOnNode) || err == nil && len(result) == 0 {
		return nil, nil
	}
	return &feasible{node, result}, err
}

// first is the first node of the list that can serve the claim.
func (c *cluster) first(pod searching, claim *resourceapi.ResourceClaim) (*feasible, error) {
	return c.firstFrom(0, pod, claim)
}

// rotating is the first one after the node of the claim before.
func (c *cluster) rotating(pod searching, claim *resourceapi.ResourceClaim) (*feasible, error) {
	found, err := c.firstFrom(c.start, pod, claim)
	if found != nil {
		c.start = (found.node + 1) % len(c.Nodes)
	}
	return found, err
}

func (c *cluster) firstFrom(start int, pod searching, claim *resourceapi.ResourceClaim) (*feasible, error) {
	for offset := range c.Nodes {
		found, err := c.on((start+offset)%len(c.Nodes), pod, claim)
		if found != nil || err != nil {
			return found, err
		}
	}
	return nil, nil
}

// sampled searches as kube-scheduler does: workers share the nodes, in chunks, from where the last search ended,
// until there are enough feasible ones. Which of them a real scheduler takes is for its scores; here it is the
// first in the list, which costs nothing.
func (c *cluster) sampled(pod searching, claim *resourceapi.ResourceClaim) (*feasible, error) {
	total := len(c.Nodes)
	wanted, chunk := feasibleWanted(total), max(1, min(int(math.Sqrt(float64(total))), total/parallelism+1))
	var next, seen, found atomic.Int64
	var lock sync.Mutex
	var best *feasible
	var failure error
	worker := func() {
		for found.Load() < wanted {
			begin := int(next.Add(int64(chunk))) - chunk
			for offset := begin; offset < min(begin+chunk, total) && found.Load() < wanted; offset++ {
				seen.Add(1)
				node, err := c.on((c.start+offset)%total, pod, claim)
				if node == nil && err == nil {
					continue
				}
				found.Add(1)
				lock.Lock()
				if failure = errors.Join(failure, err); err == nil && (best == nil || node.node < best.node) {
					best = node
				}
				lock.Unlock()
			}
			if begin >= total {
				return
			}
		}
	}
	var workers sync.WaitGroup
	for range parallelism {
		workers.Go(worker)
	}
	workers.Wait()
	c.start = (c.start + int(seen.Load())) % total
	return best, failure
}

// feasibleWanted is how many feasible nodes kube-scheduler looks for where percentageOfNodesToScore is not set.
func feasibleWanted(nodes int) int64 {
	if nodes < fewestFeasible {
		return int64(nodes)
	}
	percentage := max(50-nodes/125, leastPercentage)
	return int64(max(nodes*percentage/100, fewestFeasible))
}

// take makes the devices of a claim those in use, and says where it went.
func (c *cluster) take(number int, found *feasible) *place {
	if found == nil {
		return nil
	}
	c.held[number] = found.result
	went := &place{Node: c.Nodes[found.node].Name}
	for _, result := range found.result {
		for _, device := range result.Devices.Results {
			went.Devices = append(went.Devices, [4]string{device.Request, device.Driver, device.Pool, device.Device})
			id := structured.MakeDeviceID(device.Driver, device.Pool, device.Device)
			switch {
			case device.AdminAccess != nil && *device.AdminAccess:
			case device.ShareID != nil:
				c.state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, device.ShareID))
				if len(device.ConsumedCapacity) > 0 { // none, once a claim was stored and read
					c.state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, device.ConsumedCapacity))
				}
			default:
				c.state.AllocatedDevices.Insert(id)
			}
		}
	}
	return went
}

// giveBack frees the devices of a claim that was placed before, if it was.
func (c *cluster) giveBack(number int) {
	for _, result := range c.held[number] {
		for _, device := range result.Devices.Results {
			id := structured.MakeDeviceID(device.Driver, device.Pool, device.Device)
			switch {
			case device.AdminAccess != nil && *device.AdminAccess:
			case device.ShareID != nil:
				c.state.AllocatedSharedDeviceIDs.Delete(structured.MakeSharedDeviceID(id, device.ShareID))
				if len(device.ConsumedCapacity) > 0 {
					c.state.AggregatedCapacity.Remove(structured.NewDeviceConsumedCapacity(id, device.ConsumedCapacity))
				}
			default:
				c.state.AllocatedDevices.Delete(id)
			}
		}
	}
	delete(c.held, number)
}
