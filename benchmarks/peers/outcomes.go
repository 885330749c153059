package main

import (
	"context"
	"encoding/json"
	"io"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// outcome is what becomes of a claim: a place, an error of the whole attempt, or neither where no node can serve it.
type outcome struct {
	Place *place `json:"place,omitempty"`
	Error string `json:"error,omitempty"`
}

// outcomes are those of the claims of several scenarios. After an error, the next claim is tried.
func outcomes(input io.Reader) ([][]outcome, error) {
	var scenarios []scenario
	if err := json.NewDecoder(input).Decode(&scenarios); err != nil {
		return nil, err
	}
	given := [][]outcome{}
	for _, asked := range scenarios {
		c := newCluster(asked)
		of := []outcome{}
		for number, claim := range c.Claims {
			c.change(number)
			allocator, err := structured.NewAllocator(context.Background(), c.Features, c.state, c, c.Slices, c.cache)
			if err != nil {
				return nil, err
			}
			found, err := c.first(searching{context.Background(), allocator}, claim)
			if err != nil {
				of = append(of, outcome{Error: err.Error()})
				continue
			}
			of = append(of, outcome{Place: c.take(number, found)})
		}
		given = append(given, of)
	}
	return given, nil
}

// derivation is what an expression of a derived attribute gives of the first device. Costs are without a unit.
type derivation struct {
	Expression string                       `json:"expression"`
	Refused    string                       `json:"refused,omitempty"`
	Failed     string                       `json:"failed,omitempty"`
	Value      *resourceapi.DeviceAttribute `json:"value,omitempty"`
	MaxCost    uint64                       `json:"max_cost"`
}

func derivations(input io.Reader) ([]derivation, error) {
	var asked question
	if err := json.NewDecoder(input).Decode(&asked); err != nil {
		return nil, err
	}
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true})
	device := cel.Device{
		Driver:     asked.Driver,
		Attributes: asked.Devices[0].Attributes,
		Capacity:   asked.Devices[0].Capacity,
	}
	given := []derivation{}
	for _, expression := range asked.Expressions {
		answer := derivation{Expression: expression}
		derived := compiler.CompileCELExpression(expression, cel.Options{DerivedAttribute: true})
		if derived.Error != nil {
			answer.Refused = derived.Error.Error()
		} else {
			answer.MaxCost = derived.MaxCost
			value, _, err := derived.EvaluateDerivedAttribute(context.Background(), device)
			if answer.Value = value; err != nil {
				answer.Failed = err.Error()
			}
		}
		given = append(given, answer)
	}
	return given, nil
}
